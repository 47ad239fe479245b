"""The screen that a student sees after a failure, for results and sources made up here."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.console import Console

from milestones.course.exercise import Exercise
from milestones.course.student.check_screen import Attempt, show_attempts
from milestones.course.testing.calls import called_by
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


def test_the_tests_that_fail_are_counted() -> None:
    failed = result("failed", Failure("AssertionError"))
    assert "failed 2 of 3 tests" in shown(failed, result("passed"), failed)
    assert "passed 3 of 3 tests" in shown(*[result("passed")] * 3)


def test_the_tests_of_an_unwritten_function_are_counted() -> None:
    """Half of an exercise is written: the failures that are not listed have a reason."""
    failed = result("failed", Failure("AssertionError"))
    unwritten = result("failed", Failure("NotImplementedError", unwritten=("m2.1",)))
    words = shown(failed, unwritten, unwritten)
    assert "failed 3 of 3 tests" in words
    assert "2 more tests call a function that is not written yet" in words
    assert "1 more test calls a function that is not" in shown(failed, unwritten)
    assert "more test" not in shown(unwritten, unwritten), "the first failure says it already"


def test_an_exception_without_a_message_ends_with_its_name() -> None:
    assert "raised KeyboardInterrupt the test" in shown(
        result("failed", Failure("KeyboardInterrupt", test_line="test_shelf.py:3"))
    )


def test_what_an_assert_says_is_enough() -> None:
    """Pytest's explanation, often a page of tensors, is shown only if an assert has no message."""
    account = "assert not tensor([nan, nan])"
    assert f"but {account}" in shown(
        result("failed", Failure("AssertionError", explanation=account))
    )
    words = shown(result("failed", Failure("AssertionError", SAID, explanation=account)))
    assert f"message {SAID}" in words and "nan" not in words


@pytest.mark.parametrize(
    ("source", "row"),
    [("shelf.put(5)", "called shelf.put(5)"), ("shelf.items", "value shelf.items")],
)
def test_only_a_call_was_called(source: str, row: str) -> None:
    failure = Failure("AssertionError", SAID, called=source, returned="1", expected="2")
    assert f"{row} result 1 expected 2" in shown(result("failed", failure))


def test_a_crash_is_shown_with_its_test() -> None:
    crashed = result("crashed", Failure("crashed", "the process ended"))
    words = shown(crashed, symbol="kernels.py:decode_kernel")
    assert "test_it ended its process" in words and "look at the masks" in words
    assert "masks" not in shown(crashed), "advice about masks is for kernels only"
    words = shown(crashed, error="no test was started")
    assert "no test was started" in words and "test_it ended its process" in words


def test_a_hang_behind_another_failure_is_told() -> None:
    """The first failure does not say which test does not end, and where."""
    hang = result("timeout", Failure("timeout", where="m2_mini/shelf.py:7 in put"))
    words = shown(result("failed", Failure("AssertionError")), hang, result("failed"))
    assert "fail too: test_it does not end, at m2_mini/shelf.py:7 in put test_it" in words


def test_the_parameters_of_a_test_are_shown() -> None:
    failed = result("failed", Failure("AssertionError"))
    words = shown(failed, Result("test_shelf.py::test_it[waiting]", "failed", failure=None))
    assert "fail too: test_it[waiting]" in words


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
