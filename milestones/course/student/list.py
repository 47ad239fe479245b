"""Show each milestone: its lesson, its size, what is new, and your progress.

Below the table are the exercises of your own milestone. Lines are those of the engine's Python
files, with comments and without its demo; those that the milestone below does not have are new. The
state of an exercise is what its last `check` has found, or "not checked".

Exit status: 0; 2 the file of the exercises is wrong.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...chain import below, chain, course_place, engines, extending, own_name, place, sources
from ..catalog import CatalogError, load, taught_engines
from ..delta import ROOT
from ..exercise import Exercise
from ..release.cut import still_cut
from .check_screen import STYLES
from .progress import Progress, load_progress

EXAMPLE = "python -m milestones list"
REFUSALS = (CatalogError,)


@dataclass(frozen=True)
class Size:
    """The lines of a milestone, and how many of them the milestone below does not have."""

    lines: int
    added: int
    changed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`python -m milestones list` has no arguments."""


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Show the milestones from the lowest to the highest, the electives, and your exercises."""
    console = Console()
    names, progress = engines(root), load_progress(root)
    started = [name for name in names if (root / course_place(name) / "start").is_dir()]
    exercises = {name: load(name, root, strict=False) for name in taught_engines(root)}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("milestone", style="bold", no_wrap=True)
    is_low = console.is_terminal and console.height < 3 * len(names)
    table.add_column("lesson", overflow="ellipsis", no_wrap=is_low, ratio=1)
    for column in ("lines", "new"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("points", justify="right", no_wrap=True)
    for name in names:
        size = size_of(root, name, below(name, root))
        given = bool(started) and name in chain(started[0], root)[:-1]
        table.add_row(
            name, lesson(name, root), str(size.lines), str(size.added + size.changed),
            "given" if given else progress_of(exercises.get(name, ()), progress),
        )  # fmt: skip
    console.print(table)
    for name in started:
        console.print(exercises_table(exercises.get(name, ()), root, progress))
    return 0


def lesson(milestone: str, root: Path) -> str:
    """Return a milestone's lesson: the first sentence of its package's docstring."""
    source = (root / place(milestone) / "__init__.py").read_text(encoding="utf-8")
    doc = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].replace("\n", " ")
    sentence = re.sub(r"^(Milestone \d+|Elective): ", "", doc)
    return sentence[:1].upper() + sentence[1:]


def progress_of(exercises: tuple[Exercise, ...], progress: Progress) -> str:
    """Return the points in a milestone: those of passed exercises, and all."""
    points = sum(exercise.points for exercise in exercises)
    done = sum(exercise.points for exercise in exercises if exercise.id in progress.passed)
    said = f"{done} of {points}" if points else ""
    return f"[green]{said}[/]" if done == points else said


def exercises_table(exercises: tuple[Exercise, ...], root: Path, progress: Progress) -> Table:
    """Return the exercises of a milestone, one row each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    for exercise in exercises:
        state = state_of(exercise, root, progress)
        styled = Text(state, style=STYLES.get(state, "yellow"))
        table.add_row(exercise.id, exercise.title, f"{exercise.points} points", styled)
    return table


def state_of(exercise: Exercise, root: Path, progress: Progress) -> str:
    """Return the state of an exercise: from the last `check`, and from its functions now."""
    if exercise.id in progress.passed:
        return "passed"
    if still_cut(exercise, root):
        return "not written"
    return "failed" if exercise.id in progress.failed else "not checked"


def size_of(root: Path, milestone: str, below: str | None) -> Size:
    """Count the lines of a milestone. For a student's own: the lines of the complete milestone."""
    complete = root / course_place(milestone) / "start" / "size.json"
    if complete.is_file():
        return Size(**json.loads(complete.read_text(encoding="utf-8")))
    new = lines_of(milestone, root)
    old = lines_of(below, root) if below else {}
    all_new = extending(sources(below, root) if below else {}, sources(milestone, root))
    added = changed = 0
    for name, lines in new.items():
        before = [] if name in all_new else old.get(name, old.get(own_name(name), []))
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
