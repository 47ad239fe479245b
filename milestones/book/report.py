"""What a page shows after a check, as data: the words are those of `python -m milestones check`."""

from __future__ import annotations

from typing import Any

from ..course.student.attempt import Attempt
from ..course.student.failure_words import (
    called_unwritten,
    facts,
    name_of,
    notes,
    outcome_of,
    rest_in_words,
    unwritten_words,
)
from ..course.testing.results import Failure

Json = dict[str, Any]
MOST_PRINTED = 12  # lines


def report_of(attempt: Attempt) -> Json:
    """Return the report of an exercise after its tests were run."""
    run, exercise = attempt.run, attempt.exercise
    assert run is not None
    count, number = sum(result.passed for result in run.results), len(run.results)
    tests = f"{count} of {number + len(run.not_run)} tests pass"
    if run.passed:
        head = f"{exercise.id} passes: {exercise.points} points."
        return {"state": "passed", "head": head, "tests": tests}
    first = run.first_failure
    if first is None:
        head = f"The tests stopped with an error: {run.error}"
        return {"state": "failed", "head": head, "tests": tests}
    if words := called_unwritten(attempt, first):
        return {"state": "not written", "head": words, "tests": tests}
    return {
        "state": attempt.state,
        "head": f"{name_of(first)} {outcome_of(first)}",
        "tests": tests,
        "title": first.title,
        "facts": [
            list(fact) for fact in facts(first.failure or Failure("unknown"), attempt.caller)
        ],
        "notes": notes(attempt, first),
        "printed": "\n".join(first.printed.splitlines()[-MOST_PRINTED:]),
        "rest": "\n".join(rest_in_words(run)).strip(),
    }


def syntax_report(error: Failure) -> Json:
    """Return the report of a file that Python cannot read."""
    head, source = f"{error.where}: {error.message}", error.source or ""
    return {"state": "failed", "head": head, "facts": [["", source, "wrong"]] if source else []}


def unwritten_report(attempt: Attempt) -> Json:
    """Return the report of an exercise of which nothing is written, so no test was run."""
    return {"state": "not written", "head": unwritten_words(attempt, attempt.absent)}
