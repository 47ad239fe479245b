"""The figures of a run, the problems that it finds, and the tables of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Literal

from rich.table import Table

from common.displays.demo import machine
from common.displays.shapes import summary_table

from ...recording import write_block
from .parts import KINDS, PARTS

Kind = Literal["wrong", "stuck", "lost"]
OUTCOMES = ("again", "ends", "dead", "wrong")


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
            self.lanes[lane] = total([self.lanes[lane], tally]) if lane in self.lanes else tally
        self.failed += other.failed
        self.leaks += other.leaks
        for name, cell in other.cells.items():
            self.cells.setdefault(name, Counter()).update(cell)

    def milestones(self) -> dict[str, Tally]:
        """Return the figures by milestone: the sum over its modes."""
        names = dict.fromkeys(lane.split()[0] for lane in self.lanes)
        return {name: total(self.lanes[lane] for lane in self.lanes_of(name)) for name in names}

    def lanes_of(self, milestone: str) -> list[str]:
        return sorted(lane for lane in self.lanes if lane.split()[0] == milestone)


def total(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of tallies, with the memory of the first start and of the last end."""
    tallies = list(tallies)
    sums = Tally(*(sum(getattr(t, f.name) for t in tallies) for f in fields(Tally)))
    sums.memory_start_mb = min(t.memory_start_mb for t in tallies)
    sums.memory_end_mb = max(t.memory_end_mb for t in tallies)
    return sums


COUNTED = [f.name for f in fields(Tally) if f.type == "int"]
COLUMNS = (*COUNTED, "seconds", "MB at start", "MB at end")


def cells(tally: Tally) -> list[str]:
    """Return the figures of a row."""
    counted = [f"{getattr(tally, name):,}" for name in COUNTED]
    seconds, start, end = tally.seconds, tally.memory_start_mb, tally.memory_end_mb
    return [*counted, f"{seconds:,.0f}", f"{start:,.0f}", f"{end:,.0f}"]


def rows(results: Results) -> list[tuple[str, list[str]]]:
    """Return a row for each lane, and a sum for a milestone with several modes."""
    milestones, found = results.milestones(), list[tuple[str, list[str]]]()
    for name, whole in milestones.items():
        lanes = results.lanes_of(name)
        found += [(lane, cells(results.lanes[lane])) for lane in lanes]
        if len(lanes) > 1:
            found.append((name, cells(whole)))
    if len(milestones) > 1:
        found.append(("all", cells(total(milestones.values()))))
    return found


def grid(results: Results) -> tuple[tuple[str, ...], list[tuple[str, list[str]]]]:
    """Return the columns and the rows of a run: its figures, or its matrix of failures.

    A cell of the matrix says what a single failure did, then what a lasting one did. "never": no
    schedule reached the part.
    """
    cells = results.cells
    if not cells:
        return COLUMNS, rows(results)
    names = [name.split() for name in cells]
    parts = [part for part in PARTS if part in {part for _engine, part, _kind in names}]

    def words(engine: str, part: str) -> str:
        found = [cells.get(f"{engine} {part} {kind}") for kind in KINDS]
        return ", ".join(
            " or ".join(word for word in OUTCOMES if outcomes[word]) or "never"
            for outcomes in found
            if outcomes is not None
        )

    engines = dict.fromkeys(engine for engine, _part, _kind in names)
    return tuple(parts), [(e, [words(e, part) or "-" for part in parts]) for e in engines]


def table(results: Results, title: str) -> Table:
    """Return the figures as a table for a terminal."""
    columns, lines = grid(results)
    made = summary_table(title, "engine", *columns)
    for name, values in lines:
        made.add_row(name, *values)
    return made


def write_page(path: Path, results: Results, seed: int, minutes: float, jobs: int) -> None:
    """Write the figures into the block of a page that is for them."""
    columns, body = grid(results)
    schedules = sum(tally.schedules for tally in results.lanes.values())
    is_wrong = results.failed or results.leaks
    lines = [
        f"Seed {seed}, {schedules:,} schedules, {minutes:,.0f} minutes, "
        f"{jobs} process{'es' if jobs > 1 else ''}, {machine()}, {date.today().isoformat()}. "
        f"{'Something is wrong.' if is_wrong else 'Nothing is wrong.'}",
        "",
        f"| engine | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
        *(f"| {name} | {' | '.join(values)} |" for name, values in body),
    ]
    write_block(path, "faults" if results.cells else "soak", lines)
