"""Show each milestone: its lesson, its size, what is new, and your progress.

Below the table are the exercises of your own milestone. Lines are those of the engine's Python
files, with comments and without its demo. The columns "added" and "changed" compare them with the
milestone below. The state of an exercise is what its last `check` has found, or "not checked".

Exit status: 0; 2 the file of the exercises is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...chain import below, chain, course_place, engines, own_name, sources
from ..delta import ROOT
from ..exercise import Exercise
from ..record import RecordError, load, recorded
from ..release.cut import still_cut
from .check import print_json
from .lessons import lesson
from .progress import Progress, load_progress
from .screen import STYLES

EXAMPLE = "python -m milestones list --json"


@dataclass(frozen=True)
class Size:
    """The lines of a milestone, and how many of them the milestone below does not have."""

    lines: int
    added: int
    changed: int


@dataclass(frozen=True)
class Task:
    """An exercise of the student's own milestone."""

    id: str
    title: str
    points: int
    state: str  # "passed", "failed", "not written", or "not checked": as the last check has found


@dataclass(frozen=True)
class Milestone:
    """A row of the list."""

    milestone: str
    lesson: str
    size: Size
    exercises: int
    points: int
    points_done: int
    given: bool  # a complete milestone, below the student's own
    tasks: tuple[Task, ...]  # only for the student's own milestone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones list`."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Show the list."""
    console = Console(stderr=args.json)
    try:
        ladder = listed(root)
    except RecordError as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 2
    if args.json:
        print_json({"milestones": [asdict(one) for one in ladder]})
    else:
        console.print(table_of(ladder))
        for one in ladder:
            if one.tasks:
                console.print(tasks_table(one))
    return 0


def listed(root: Path) -> list[Milestone]:
    """Return the milestones of a tree, from the lowest to the highest, and then its electives."""
    names, progress = engines(root), load_progress(root)
    started = [name for name in names if (root / course_place(name) / "start").is_dir()]
    found = []
    for name in names:
        exercises = load(name, root, strict=False) if name in recorded(root) else ()
        found.append(
            Milestone(
                milestone=name,
                lesson=lesson(name, root),
                size=size_of(root, name, below(name, root)),
                exercises=len(exercises),
                points=sum(exercise.points for exercise in exercises),
                points_done=sum(e.points for e in exercises if e.id in progress.passed),
                given=bool(started) and name in chain(started[0], root)[:-1],
                tasks=tuple(task(e, root, progress) for e in exercises if name in started),
            )
        )
    return found


def task(exercise: Exercise, root: Path, progress: Progress) -> Task:
    """Return an exercise with its state: from the last `check`, and from its functions now."""
    if exercise.id in progress.passed:
        state = "passed"
    elif still_cut(exercise, root):
        state = "not written"
    else:
        state = "failed" if exercise.id in progress.failed else "not checked"
    return Task(exercise.id, exercise.title, exercise.points, state)


def size_of(root: Path, milestone: str, below: str | None) -> Size:
    """Count the lines of a milestone. For a student's own: the lines of the complete milestone."""
    complete = root / course_place(milestone) / "start" / "size.json"
    if complete.is_file():
        return Size(**json.loads(complete.read_text(encoding="utf-8")))
    new = lines_of(milestone, root)
    old = lines_of(below, root) if below else {}
    extending = {own_name(name) for name in new if own_name(name) != name}  # all lines are new
    added = changed = 0
    for name, lines in new.items():
        before = [] if name in extending else old.get(own_name(name), [])
        matcher = difflib.SequenceMatcher(None, before, lines, autojunk=False)
        for kind, _, _, first, last in matcher.get_opcodes():
            added += last - first if kind == "insert" else 0
            changed += last - first if kind == "replace" else 0
    return Size(sum(map(len, new.values())), added, changed)


def lines_of(milestone: str, root: Path) -> dict[str, list[str]]:
    """Return the lines of each Python file of an engine, without its demo."""
    files = sources(milestone, root)
    found = {name: path for name, path in files.items() if not name.startswith("demo/")}
    return {name: path.read_text("utf-8").splitlines() for name, path in found.items()}


def table_of(ladder: list[Milestone]) -> Table:
    """Return the table of all milestones."""
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="dim")
    table.add_column("milestone and lesson", overflow="fold", ratio=1)
    for name in ("lines", "added", "changed", "points"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("progress", no_wrap=True)
    for one in ladder:
        table.add_row(
            Text.assemble((one.milestone, "bold"), f"\n{one.lesson}"),
            str(one.size.lines), str(one.size.added), str(one.size.changed),
            str(one.points or ""), progress_of(one),
        )  # fmt: skip
    return table


def tasks_table(milestone: Milestone) -> Table:
    """Return the exercises of a milestone, one row each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    for one in milestone.tasks:
        state = Text(one.state, style=STYLES.get(one.state, "yellow"))
        table.add_row(one.id, one.title, f"{one.points} points", state)
    return table


def progress_of(milestone: Milestone) -> str:
    """Return the progress in a milestone, in words."""
    if milestone.given:
        return "given"
    if not milestone.exercises:
        return ""
    return (
        "[green]done[/]"
        if milestone.points_done == milestone.points
        else f"{milestone.points_done} of {milestone.points}"
    )
