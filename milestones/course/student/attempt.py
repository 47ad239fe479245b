"""`Attempt`: an exercise and the results of its tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..exercise import Exercise
from ..testing.results import Run

State = Literal["passed", "failed", "not written", "not run"]


@dataclass(frozen=True)
class Attempt:
    """An exercise, and the results of its tests (None: they were not run)."""

    exercise: Exercise
    run: Run | None = None
    unwritten: tuple[str, ...] = ()  # its functions that the student has not written yet

    @property
    def state(self) -> State:
        if self.run is None:
            return "not run"
        if self.run.passed:
            return "passed"
        first = self.run.first_failure
        return "not written" if first is not None and first.unwritten else "failed"
