"""The counts of a run, and the problems that it finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Literal

Kind = Literal["wrong", "stuck", "lost"]


class SoakError(Exception):
    """An engine broke a promise.

    wrong: a wrong answer, a broken invariant, or an unexpected exception.
    stuck: the engine says that it has unfinished requests, and none of them makes progress.
    lost: a request without its final output, or with more than one.
    """

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass
class Tally:
    """The figures of one milestone, or of one mode of its forward stream."""

    schedules: int = 0
    requests: int = 0  # admitted
    extras: int = 0  # of these, with something that only the elective has; drafts of `speculative`
    steps: int = 0  # calls of `step`
    tokens: int = 0  # output tokens that were compared
    retractions: int = 0
    aborts: int = 0  # requests that ended by `abort`, and streams left early
    refusals: int = 0  # bad requests that raised `ValueError`, and calls from another thread
    failures: int = 0  # injected: forwards, rows of logits, texts
    errors: int = 0  # requests that ended by `error`, as the plan says
    interrupts: int = 0  # delivered inside a call
    wrong: int = 0
    stuck: int = 0
    lost: int = 0
    seconds: float = 0.0
    memory_start_mb: float = 0.0  # of the process, when the first schedule had ended
    memory_end_mb: float = 0.0  # when the last schedule had ended

    @property
    def num_problems(self) -> int:
        return self.wrong + self.stuck + self.lost


@dataclass(frozen=True)
class Failed:
    """A schedule with a problem, and the command that runs it again."""

    seed: int
    number: int
    milestone: str
    mode: str
    part: str  # the part of a step that failed, in the matrix of failures
    message: str = ""

    @property
    def command(self) -> str:
        """The command that runs this schedule alone."""
        faults = f" --faults {self.part}" if self.part else ""
        return (
            f"python -m milestones soak --seed {self.seed} --milestone {self.milestone} "
            f"--schedule {self.number}{faults}"
        )


@dataclass
class Results:
    """All figures of a run, by lane, and the problems.

    A lane is a milestone, or a milestone and a mode of its forward stream: `m5_overlap late`.
    """

    lanes: dict[str, Tally] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)  # of memory, in words
    # What failures did: "engine part kind" -> how often each outcome came.
    cells: dict[str, Counter[str]] = field(default_factory=dict)

    def merge(self, other: Results) -> None:
        """Add the results of another process."""
        for lane, tally in other.lanes.items():
            self.lanes[lane] = added(self.lanes[lane], tally) if lane in self.lanes else tally
        self.failed += other.failed
        self.leaks += other.leaks
        for name, cell in other.cells.items():
            self.cells.setdefault(name, Counter()).update(cell)

    def milestones(self) -> dict[str, Tally]:
        """Return the figures by milestone: the sum over its modes."""
        found: dict[str, Tally] = {}
        for lane, tally in self.lanes.items():
            milestone = lane.partition(" ")[0]
            found[milestone] = added(found[milestone], tally) if milestone in found else tally
        return found


def added(one: Tally, other: Tally) -> Tally:
    """Return the sum of two tallies, with the memory of the first start and of the last end."""
    total = Tally(*(getattr(one, f.name) + getattr(other, f.name) for f in fields(Tally)))
    total.memory_start_mb = min(one.memory_start_mb, other.memory_start_mb)
    total.memory_end_mb = max(one.memory_end_mb, other.memory_end_mb)
    return total
