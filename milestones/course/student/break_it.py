"""Make the mistake of an exercise's *Break it*, and show what it does to tests and answers.

In the complete code base, the mistake is a patch, which is applied to a copy. In a student's tree,
you make the mistake yourself: the command waits until you save it, runs the tests, and puts your
files back. It then shows all tests that fail, and the answers of a few requests that change.

Exit status: 0 the mistake does what the catalog says; 1 it does something else; 2 it could not be
tried.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from ...chain import place
from ..catalog import CatalogError, find, find_mutant, patches_of
from ..delta import ROOT
from ..exercise import Exercise
from ..testing.runner import Runner, RunnerError
from .break_effect import Effect, show_effect
from .handout import part
from .progress import ANSWERS, FOLDER
from .watch import changes, syntax_error

EXAMPLE = "python -m milestones break m3.2"
SECONDS = 20.0  # limit for each test
PROGRAM = "milestones/course/student/engine_answers.py"


class BreakError(Exception):
    """The mistake could not be tried. The message says why."""


REFUSALS = (CatalogError, RunnerError, BreakError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones break`."""
    parser.add_argument("exercise", help="the id of an exercise: m3.2")


def main(args: argparse.Namespace, root: Path = ROOT, runner: Runner | None = None) -> int:
    """Try the mistake, and show its effect."""
    console = Console()
    exercise = find(args.exercise, root)
    question, _ = part("Break it", exercise, root)
    if not question:
        raise BreakError(f"the handout has no *Break it* for {exercise.id}")
    console.print(Markdown(f"**{exercise.id}, Break it.** {question}"))
    with nullcontext(runner) if runner else Runner() as server:
        if patches_of(exercise.milestone, root).is_file():
            effect = of_patch(exercise, root, server)
        else:
            effect = by_hand(exercise, root, server, console)
    show_effect(console, effect)
    return 0 if compared(console, exercise, effect) else 1


def of_patch(exercise: Exercise, root: Path, runner: Runner) -> Effect:
    """Apply the patch to a copy of the tree. Return the effect."""
    with tempfile.TemporaryDirectory(prefix="ladder-break-") as folder:
        return Patches(root, Path(folder).resolve() / "tree", runner).effect(exercise)


class Patches:
    """Tries patches in a copy of a tree, one after the other."""

    def __init__(self, root: Path, tree: Path, runner: Runner) -> None:
        # Not in students' trees.
        self.mutants = importlib.import_module("...staff.maintain.mutants", __package__)
        self.root = root
        self.tree = self.mutants.copy(root, tree)
        self.runner = runner
        self.right: dict[str, dict[str, Any]] = {}  # the answers of each milestone's engine

    def effect(self, exercise: Exercise) -> Effect:
        """Return what the mistake of an exercise does."""
        name = exercise.milestone
        if name not in self.right:
            self.right[name] = answers_of(exercise, self.tree, self.runner)
        mutant = find_mutant(name, exercise.mistake, self.root)
        with self.mutants.applied(mutant, self.tree) as refusal:
            if refusal is not None:
                raise BreakError(f"{mutant.name} does not apply: {refusal}")
            run = self.runner.run(self.tree, exercise.tests, seconds=SECONDS)
            return Effect(run, self.right[name], answers_of(exercise, self.tree, self.runner))


def by_hand(exercise: Exercise, root: Path, runner: Runner, console: Console) -> Effect:
    """Wait until the student has made the mistake, try it, and put the files back."""
    console.print(
        f"\nFirst your own code is tested. Do not change it before {exercise.id} has passed.",
        soft_wrap=True,
    )
    if not runner.run(root, exercise.tests, seconds=SECONDS).passed:
        raise BreakError(
            f"{exercise.id} does not pass yet. To see what fails:  "
            f"python -m milestones check {exercise.id}"
        )
    right = answers_of(exercise, root, runner)
    folder = root / place(exercise.milestone)
    with put_back(folder, root / FOLDER / f"{exercise.id}.mistake"):
        console.print(
            f"It passes. Make the mistake in {', '.join(exercise.sources)} now, and save the file. "
            "Your version comes back after the run, or with Ctrl-C.", soft_wrap=True,
        )  # fmt: skip
        saved = changes([folder])
        next(saved)
        try:
            next(saved)
            while error := syntax_error(root, exercise.milestone):
                console.print(f"{error['where']}: {error['message']}", style="red")
                next(saved)
        except KeyboardInterrupt as stop:
            raise BreakError("nothing was tried") from stop
        run = runner.run(root, exercise.tests, seconds=SECONDS)
        return Effect(run, right, answers_of(exercise, root, runner) if right else {})


@contextmanager
def put_back(folder: Path, kept: Path) -> Iterator[None]:
    """Restore all Python files of a folder at the end. Keep copies of those that had changed."""
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    try:
        yield
    finally:
        for path, data in before.items():
            if not path.exists() or path.read_bytes() != data:
                kept.mkdir(parents=True, exist_ok=True)
                if path.exists():
                    (kept / path.name).write_bytes(path.read_bytes())
                path.write_bytes(data)


def answers_of(exercise: Exercise, tree: Path, runner: Runner) -> dict[str, Any]:
    """Return the answers of the whole engine, or nothing if it is not complete."""
    written = tree / ANSWERS
    written.unlink(missing_ok=True)
    runner.run(tree, [f"{PROGRAM}::test_answers[{exercise.milestone}]"], seconds=SECONDS)
    found: dict[str, Any] = {}
    if written.is_file():
        found = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
    unwritten = any("NotImplementedError" in str(r["error"]) for r in found.values())
    return {} if unwritten else found


def compared(console: Console, exercise: Exercise, effect: Effect) -> bool:
    """Print how the effect differs from the catalog. Return whether it is the same."""
    missing = [name for name in exercise.red if name not in effect.red]
    more = [name for name in effect.red if name not in exercise.red]
    for names, said in ((missing, "should fail, and pass"), (more, "fail, and should pass")):
        if names:
            console.print(f"With the handout's mistake, these {said}: {', '.join(names)}")
    other = bool(effect.right) and effect.answers != exercise.answers
    if other:
        console.print(f"With the handout's mistake, the answers are: {exercise.answers}")
    if not (missing or more or other):
        console.print("This is what the handout's mistake does.", style="green")
    return not (missing or more or other)
