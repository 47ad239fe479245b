"""The results of tests as data, for a student's screen, the grader and the proofs."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["passed", "failed", "error", "skipped", "timeout", "crashed"]


@dataclass(frozen=True)
class Failure:
    """Why a test did not pass. Fields that do not apply are None or empty.

    `unwritten` has the exercises that ended the test by `NotImplementedError`, the outermost first.
    `where` is the last line that ran outside the tests ("m1_single/engine.py:77 in step").
    `calls` has these lines of all functions that had not returned, the outermost first.
    `test_line` is the line of the test. `stacks` has the stacks of all threads of a test that did
    not end.
    """

    kind: str  # the class of the exception
    message: str = ""  # the message of the assert or of the exception
    called: str | None = None  # source code
    returned: str | None = None  # repr
    expected: str | None = None  # repr, or an operator and a repr
    explanation: str = ""  # pytest's explanation of an assert
    example: str = ""  # the example that Hypothesis found
    unwritten: tuple[str, ...] = ()
    where: str | None = None
    calls: tuple[str, ...] = ()
    test_line: str | None = None
    source: str | None = None  # for a syntax error: the line and a caret
    trace: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class Result:
    """The result of a test, or the error of a file of tests that could not be collected."""

    node: str
    outcome: Outcome
    seconds: float = 0.0
    title: str = ""  # the first line of the test's docstring
    printed: str = ""  # the end of what it printed, if it did not pass
    failure: Failure | None = None

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def unwritten(self) -> tuple[str, ...]:
        """The exercises that are not written and ended the test."""
        return self.failure.unwritten if self.failure else ()


@dataclass(frozen=True)
class Run:
    """The results in order, and an error outside the tests (None: there was none).

    `not_run` has the tests that were left out after a test that did not end.
    """

    results: tuple[Result, ...] = ()
    error: str | None = None
    not_run: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there were tests and all of them passed."""
        return bool(self.results) and not (self.error or self.not_run or self.failures)

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if not result.passed)

    @property
    def first_failure(self) -> Result | None:
        return next(iter(self.failures), None)


def with_caret(error: SyntaxError) -> str:
    """Return the line of a syntax error with a caret below its place, or "" without a line."""
    line = (error.text or "").rstrip("\n")
    caret = " " * len(line[: (error.offset or 1) - 1].expandtabs()) + "^"
    return textwrap.dedent(f"{line.expandtabs()}\n{caret}") if line else ""


def result_of(data: dict[str, Any]) -> Result:
    """Return a result that was sent as JSON."""
    failure = data.get("failure")
    if failure:
        tuples = {name: tuple(failure[name]) for name in ("unwritten", "calls")}
        failure = Failure(**{**failure, **tuples})
    return Result(**{**data, "failure": failure})
