"""`Attempt`: an exercise and the results of its tests. What is not written yet is not tested."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..catalog import closure
from ..exercise import Exercise
from ..release.cut import still_cut
from ..testing.results import Run
from .progress import Progress

State = Literal["passed", "failed", "not written", "not run"]


@dataclass(frozen=True)
class Attempt:
    """An exercise, and the results of its tests (None: they were not run)."""

    exercise: Exercise
    run: Run | None = None
    unwritten: tuple[str, ...] = ()  # its functions that the student has not written yet
    caller: str | None = None  # its function that called the given code which failed: `own_code`
    absent: str = ""  # this exercise, or one that it needs, if nothing of it is written

    @property
    def state(self) -> State:
        if self.absent:
            return "not written"
        if self.run is None:
            return "not run"
        if self.run.passed:
            return "passed"
        first = self.run.first_failure
        return "not written" if first is not None and first.unwritten else "failed"


def not_written(exercise: Exercise, own: tuple[Exercise, ...], root: Path) -> str:
    """Return an exercise itself, or one that it needs, if no function of it is written; or ""."""
    needed = closure(exercise, own)
    for other in (exercise, *(other for other in own if other.id in needed)):
        if len(still_cut(other, root)) == len(other.symbols):
            return other.id
    return ""


def standing(exercises: tuple[Exercise, ...], progress: Progress) -> str:
    """Return how far a milestone is done, as the last checks have found it."""
    passed = [exercise for exercise in exercises if exercise.id in progress.passed]
    points, all_points = (sum(e.points for e in group) for group in (passed, exercises))
    return (
        f"{exercises[0].milestone}: {len(passed)} of {len(exercises)} exercises pass, "
        f"{points} of {all_points} points"
    )
