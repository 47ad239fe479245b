"""The screen that a student sees after a failure, for results and sources made up here."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.console import Console

from milestones.course.exercise import Exercise
from milestones.course.student.attempt import Attempt
from milestones.course.student.check_screen import show_attempts
from milestones.course.testing.called import called_by
from milestones.course.testing.results import Failure, Outcome, Result, Run

SAID = "I3: an item is lost"


def result(outcome: Outcome, failure: Failure | None = None) -> Result:
    return Result("test_shelf.py::test_it", outcome, failure=failure)


def shown(*results: Result, error: str | None = None, symbol: str = "shelf.py:Shelf.put") -> str:
    """Return the words on the screen for an exercise with these results."""
    exercise = Exercise("m2_mini", "m2.1", "Put it", 1, 1, "It.", (), (symbol,), ("t.py",), ())
    stream = io.StringIO()
    show_attempts(Console(file=stream, width=100), [Attempt(exercise, Run(results, error))])
    return " ".join(stream.getvalue().split())


FAILED = result("failed", Failure("AssertionError"))
PASSED = result("passed")
UNWRITTEN = result("failed", Failure("NotImplementedError", unwritten=("m2.1",)))
CRASHED = result("crashed", Failure("crashed", "the process ended"))
HANG = result("timeout", Failure("timeout", where="m2_mini/shelf.py:7 in put"))
TENSORS = "assert not tensor([nan, nan])"
KERNEL = {"symbol": "kernels.py:decode_kernel"}


def compared(source: str) -> Result:
    failure = Failure("AssertionError", SAID, called=source, returned="1", expected="2")
    return result("failed", failure)


@pytest.mark.parametrize(
    ("results", "more", "words", "absent"),
    [
        ([FAILED, PASSED, FAILED], {}, "failed 2 of 3 tests", "more test"),
        ([PASSED, PASSED, PASSED], {}, "passed 3 of 3 tests", "fail too"),
        # Half of an exercise is written: the failures that are not listed have a reason.
        ([FAILED, UNWRITTEN], {}, "1 more test calls a function that is not written", "fail too"),
        ([FAILED, UNWRITTEN, UNWRITTEN], {}, "2 more tests call a function that is", "fail too"),
        ([UNWRITTEN, UNWRITTEN], {}, "m2.1 is not written yet", "more test"),
        (
            [result("failed", Failure("KeyboardInterrupt", test_line="test_shelf.py:3"))], {},
            "raised KeyboardInterrupt the test", "KeyboardInterrupt:",
        ),
        # Pytest's explanation, often a page of tensors, is for an assert without a message.
        (
            [result("failed", Failure("AssertionError", explanation=TENSORS))], {},
            f"but {TENSORS}", "message",
        ),
        (
            [result("failed", Failure("AssertionError", SAID, explanation=TENSORS))], {},
            f"message {SAID}", "nan",
        ),
        ([compared("shelf.put(5)")], {}, "called shelf.put(5) result 1 expected 2", "value"),
        ([compared("shelf.items")], {}, "value shelf.items result 1 expected 2", "called"),
        ([CRASHED], {}, "test_it ended its process", "masks"),
        ([CRASHED], KERNEL, "look at the masks", "fail too"),
        ([CRASHED], {"error": "no test was started"}, "no test was started m2.1", "masks"),
        # The first failure does not say which test does not end, and where.
        (
            [FAILED, HANG, FAILED], {},
            "fail too: test_it does not end, at m2_mini/shelf.py:7 in put test_it", "stacks",
        ),
        ([FAILED, Result("t.py::test_it[one]", "failed")], {}, "fail too: test_it[one]", "more"),
        # A list of many tests, or a long name, would push the message off a low terminal.
        ([FAILED] * 6, {}, "fail too:" + " test_it" * 5, "more"),
        ([FAILED] * 8, {}, "fail too:" + " test_it" * 5 + " and 2 more", "3 more"),
        (
            [Result("t.py::test_it[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, \n11]]", "failed")], {},
            "test_it[[1, 2, 3, 4, 5, … 8, 9, 10, 11]] fails", "6,",
        ),
    ],
)  # fmt: skip
def test_what_is_shown(
    results: list[Result], more: dict[str, str], words: str, absent: str
) -> None:
    said = shown(*results, **more)
    assert words in said and absent not in said


TEST = """
def test_it(shelf, items):
    got = shelf.take()
    one, got = 1, shelf.put(7)
    left, right = shelf.halves()
    size = shelf.size
    for item in items:
        LINE
    got = shelf.clear()

def test_other(shelf):
    item = shelf.other()
"""


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("got", "shelf.put(7)"),
        ("one", None),
        ("right", "shelf.halves()"),
        ("size", None),
        ("item", None),
        ("shelf.size", "shelf.size"),
    ],
)
def test_a_variable_is_shown_as_the_call_it_was_given(
    tmp_path: Path, name: str, call: str | None
) -> None:
    """A student should not have to look into the test to learn what was called."""
    path = tmp_path / "test_shelf.py"
    path.write_text(TEST.replace("LINE", f"assert {name} == 2"))
    line = path.read_text().splitlines().index(f"        assert {name} == 2") + 1
    assert called_by(ast.parse(name, mode="eval").body, path, line) == call
