"""What came of running tests, as data: the same for a student's screen, a grader and a proof."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "error", "skipped", "timeout", "crashed"]


@dataclass(frozen=True)
class Failure:
    """Why a test did not pass, taken apart; what does not apply is None or empty.

    `unwritten` has the exercises whose own `NotImplementedError` ended the test, the outermost
    first. `where` is the last line outside the tests that ran ("m1_single/engine.py:77 in step"),
    `test_line` the test's own.
    """

    kind: str  # the exception's class
    message: str = ""  # what the assert or the exception says
    called: str | None = None  # source
    returned: str | None = None  # repr
    expected: str | None = None  # repr, or an operator and a repr
    explanation: str = ""  # pytest's own, of an assert
    example: str = ""  # what hypothesis found
    unwritten: tuple[str, ...] = ()
    where: str | None = None
    test_line: str | None = None
    source: str | None = None  # of a syntax error: the line and a caret
    trace: str = ""


@dataclass(frozen=True)
class Result:
    """One test, or a file of tests that could not be collected (`outcome` is then "error")."""

    node: str
    outcome: Outcome
    seconds: float = 0.0
    title: str = ""  # the first line of the test's docstring
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
    """The results in order, and what went wrong beside the tests (None: nothing)."""

    results: tuple[Result, ...] = ()
    error: str | None = None
    output: str = field(default="", repr=False)  # the end of what pytest printed

    @property
    def passed(self) -> bool:
        """Whether there were tests and each of them passed."""
        return bool(self.results) and not self.error and all(r.passed for r in self.results)

    @property
    def first_failure(self) -> Result | None:
        return next((result for result in self.results if not result.passed), None)


def result_of(data: dict[str, Any]) -> Result:
    """A result that came as JSON."""
    failure = data.get("failure")
    if failure:
        failure = Failure(**{**failure, "unwritten": tuple(failure["unwritten"])})
    return Result(**{**data, "failure": failure})
