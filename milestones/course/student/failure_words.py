"""Say why an exercise does not pass: what was called, what was returned and what was expected.

Plain text: `check_screen.py` prints it in a terminal, and the book shows it in a page.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from ..testing.results import Failure, Result, Run
from .attempt import Attempt

INVARIANTS = {
    1: ("One answer", "Greedy output equals that of Hugging Face's `generate`, token for token."),
    2: ("Batch invariance", "A request's tokens depend only on the request itself."),
    3: ("Nothing leaks", "A request that is done, aborted or failed holds no memory."),
    4: ("Bad input is refused, alone", "The error names field and limit. Other requests go on."),
    5: ("Progress", "Any admitted request finishes. None is overtaken for ever."),
    6: ("Text is whole", "No half characters, no start of a stop string. The pieces join."),
}
LONGEST_EXPLANATION = 6  # lines
MOST_OTHERS = 5  # names of other tests that fail
LONGEST_PARAMETERS = 30  # characters of the name of a test
CALL = re.compile(r"\w\(")
CRASHED_KERNEL = "A load or store outside of a tensor can cause this: look at the masks."
OUTCOMES = {"timeout": "does not end", "crashed": "ended its process", "error": "cannot be run"}


class Fact(NamedTuple):
    """A fact of a failure: its name, a text, and whether the text is right or wrong."""

    name: str
    value: str
    kind: Literal["", "message", "wrong", "right"] = ""


def unwritten_words(attempt: Attempt, absent: str) -> str:
    """Say what is not written: functions of the exercise, or another exercise that it needs."""
    exercise = attempt.exercise
    if absent == exercise.id:
        return f"{exercise.id} is not written yet: {', '.join(attempt.unwritten)}"
    return f"{exercise.id} needs {absent}, which is not written yet"


def called_unwritten(attempt: Attempt, result: Result) -> str:
    """Say that a test called a function that is not written, or return ""."""
    if not result.unwritten:
        return ""
    own = attempt.exercise.id in result.unwritten
    return unwritten_words(attempt, attempt.exercise.id if own else result.unwritten[0])


def outcome_of(result: Result) -> str:
    """Return what a test that did not pass does: "fails"."""
    return OUTCOMES.get(result.outcome, "fails")


def facts(failure: Failure, caller: str | None) -> list[Fact]:
    """Return the facts of a failure, in order. caller: see `Attempt`."""
    if failure.kind in ("AssertionError", "Failed"):
        found = _of_assert(failure)
    else:
        ended = failure.kind in ("timeout", "crashed")
        raised = ": ".join(filter(None, (failure.kind, failure.message)))
        found = [
            Fact("called", failure.called or ""),
            Fact("but", failure.message, "wrong") if ended else Fact("raised", raised, "wrong"),
            Fact("", failure.source or ""),
        ]
    by = f", called by your {caller}" if caller else ""
    found += [
        Fact("example", failure.example),
        Fact("your code" if caller is None else "given code", f"{failure.where or ''}{by}"),
        Fact("the test", failure.test_line or ""),
        Fact("stacks", failure.stacks),
    ]
    return [fact for fact in found if fact.value]


def _of_assert(failure: Failure) -> list[Fact]:
    compared = failure.expected is not None
    name = "called" if CALL.search(failure.called or "") else "value"
    found = [
        Fact("message", failure.message, "message"),
        Fact(name if compared else "asserted", failure.called or ""),
        Fact("result", failure.returned or "", "wrong"),
        Fact("expected", failure.expected or "", "right"),
    ]
    if not compared and not failure.message:
        lines = failure.explanation.splitlines()[:LONGEST_EXPLANATION]
        found.append(Fact("but", "\n".join(lines), "wrong"))
    return found


def notes(attempt: Attempt, result: Result) -> list[str]:
    """Return what to look at, and the invariants that a failure names, in words."""
    found = []
    of_kernels = any("kernels.py:" in name for name in attempt.exercise.symbols)
    if result.outcome == "crashed" and of_kernels:
        found.append(CRASHED_KERNEL)
    for number in invariants_in(result.failure.message if result.failure else ""):
        found.append(f"I{number} {INVARIANTS[number][0]}. {INVARIANTS[number][1]}")
    return found


def rest_in_words(run: Run) -> list[str]:
    """Return the names of the other tests that failed, and the numbers of those without a result.

    A test that does not end has a reason of its own, which the first failure may not explain.
    """
    lines = []
    for result in run.failures[1:]:
        if not result.unwritten:
            where = result.failure and result.failure.where
            how = f" {OUTCOMES[result.outcome]}" if result.outcome in OUTCOMES else ""
            how += f", at {where}" if how and where else ""
            lines.append(f"  {name_of(result)}{how}")
    if (more := len(lines) - MOST_OTHERS) > 0:
        lines[MOST_OTHERS:] = [f"  and {more} more"]
    lines = ["\nThese tests fail too:", *lines] if lines else []
    unwritten = [bool(result.unwritten) for result in run.failures]
    if (count := sum(unwritten)) and not unwritten[0]:  # the first one is explained above
        many = "1 more test calls" if count == 1 else f"{count} more tests call"
        lines.append(f"\n{many} a function that is not written yet")
    if run.not_run:
        count = len(run.not_run)
        many = "1 test was" if count == 1 else f"{count} tests were"
        lines.append(f"\n{many} not run after the test that does not end")
    return lines


def name_of(result: Result) -> str:
    """Return the name of a test on one line, without the middle of long parameters."""
    name, bracket, parameters = result.node.rpartition("::")[2].partition("[")
    parameters = " ".join(parameters.split())
    if len(parameters) > LONGEST_PARAMETERS:
        half = LONGEST_PARAMETERS // 2
        parameters = f"{parameters[:half]} … {parameters[-half:]}"
    return name + bracket + parameters


def invariants_in(text: str) -> list[int]:
    """Return the numbers of the invariants that a message names."""
    return sorted({int(number) for number in re.findall(r"\bI([1-6])\b", text)})
