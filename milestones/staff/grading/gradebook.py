"""Compute points from answers and results, with the reasons that a student reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...course.exercise import Exercise
from ...course.testing.results import Result
from .answers import Answers
from .submission import HIDDEN

UNSEEN = "a hidden test"
Grade = dict[str, Any]  # the content of a results.json


@dataclass
class Mark:
    """The points of one exercise, and the reasons for lost points."""

    exercise: Exercise
    results: list[Result] = field(default_factory=list)
    answers: Answers = field(default_factory=Answers)
    refused: list[str] = field(default_factory=list)  # reasons why its tests were not run
    broken: str | None = None  # the reason why the exam ended too early

    @property
    def passed(self) -> int:
        return sum(result.passed for result in self.results)

    @property
    def share(self) -> float:
        """The lower one of two shares: of tests that passed, and of right kinds of questions."""
        return min(self.passed / max(1, len(self.results)), self.answers.share)

    @property
    def points(self) -> float:
        return round(self.exercise.points * self.share, 2)

    @property
    def suspect(self) -> bool:
        """Whether all tests passed although most answers are wrong: a person should look.

        All single answers count here. One wrong rule can break a kind and few of its answers.
        """
        all_passed = self.passed == len(self.results) > 0
        return all_passed and 2 * self.answers.right_answers < self.answers.all_answers

    @property
    def status(self) -> str:
        """The status in one or a few words."""
        if self.refused:
            return "refused"
        if self.suspect:
            return "look at it"
        if self.broken:
            return "not run to its end"
        return "passed" if self.share == 1 else "failed"


@dataclass
class Sheet:
    """The grades of one submission."""

    name: str
    milestone: str
    marks: list[Mark]
    not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: str = ""
    seed: int = 0  # of the batch
    seconds: float = 0.0

    @property
    def points(self) -> float:
        return round(sum(mark.points for mark in self.marks), 2)

    @property
    def suspect(self) -> bool:
        """Whether a person should look at the submission."""
        return any(mark.suspect for mark in self.marks)


def gradescope(sheet: Sheet) -> Grade:
    """Return `results.json`. Students see how many hidden tests passed, not what they check."""
    return {
        "score": sheet.points,
        "execution_time": round(sheet.seconds),
        "output": "\n".join(
            [*(["Not run:", *sheet.not_run] if sheet.not_run else []), *sheet.notes]
        ),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "extra_data": {
            "milestone": sheet.milestone,
            "suspect": sheet.suspect,
            "complete": not sheet.not_run,
            "digest": sheet.digest,
            "seed": sheet.seed,
        },
        "tests": [
            {
                "number": mark.exercise.id,
                "name": mark.exercise.title,
                "score": mark.points,
                "max_score": mark.exercise.points,
                "status": "passed" if mark.status == "passed" else "failed",
                "output": "\n".join(words(mark)),
                "output_format": "text",
                "visibility": "visible",
                "extra_data": {"status": mark.status},
            }
            for mark in sheet.marks
        ],
    }


def words(mark: Mark) -> list[str]:
    """Return the report for the student: each test, with the reason if it did not pass."""
    if mark.refused:
        return ["The tests of this exercise were not run.", *mark.refused]
    kinds, wrong = mark.answers.kinds, mark.answers.wrong
    right = ", ".join(kind for kind in kinds if kind not in wrong)
    lines = [
        f"{mark.passed} of {len(mark.results)} tests passed. {len(kinds) - len(wrong)} of "
        f"{len(kinds)} kinds of questions have right answers only. The lower share counts.",
        *([f"right kinds: {right}"] if right else []),
        *("    ".join(f"wrong: {about}".splitlines(True)) for about in wrong_kinds(mark.answers)),
    ]
    for result in mark.results:
        name = result.node.partition("::")[2] or result.node
        if is_hidden(result):
            lines.append(f"{UNSEEN}: {result.outcome}")
        else:
            lines.append(f"{name}: {result.outcome}{_title(result)}")
            lines += [] if result.passed else [f"    {line}" for line in why(result)]
    return lines


def wrong_kinds(answers: Answers) -> list[str]:
    """Return each wrong kind of questions with its first wrong answer."""
    return [f"{kind}: {fault}" for kind, fault in answers.wrong.items()]


def why(result: Result) -> list[str]:
    """Return a failure in a few lines; for a hang or a crash, with its place in the code."""
    failure = result.failure
    if failure is None:
        return []
    if failure.unwritten:
        return [f"{failure.unwritten[0]} is not written yet"]
    lines = [f"{failure.kind}: {failure.message}" if failure.message else failure.kind]
    lines += [failure.explanation] if failure.explanation else []
    if failure.called and failure.returned:
        lines.append(f"{failure.called} gave {failure.returned}; expected {failure.expected}")
    lines += [failure.example] if failure.example else []
    lines += [f"at {failure.where}"] if failure.where else []
    if result.outcome in ("timeout", "crashed") and not failure.where:
        lines += failure.trace.strip().splitlines()[-12:]
    return [line for text in lines for line in text.splitlines()][:40]


def is_hidden(result: Result) -> bool:
    """Return whether a test is one of the instructor's hidden tests."""
    return result.node.startswith(f"{HIDDEN}/")


def _title(result: Result) -> str:
    return f" ({result.title})" if result.title else ""
