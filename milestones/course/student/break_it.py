"""Make the mistake of an exercise's *Break it*, and show what it does to tests and answers.

In the complete code base, the mistake is a patch, which is applied to a copy. In a student's tree,
you make the mistake yourself: the command waits until you save it, runs the tests, and puts your
files back. It then shows all tests that fail, and the answers of a few requests that change. It
keeps this in `ANSWERS.md`, where you say why.

Exit status: 0 the mistake does what the catalog says; 1 it does something else; 2 it could not be
tried.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
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
from .answers_file import BREAK_IT, FILE, title_of, write, written
from .break_screen import Effect, compared, show_effect
from .check import counting, importing
from .progress import ANSWERS, FOLDER
from .watch import changes, syntax_error

EXAMPLE = "python -m milestones break m3.2"
SECONDS = 20.0  # limit for each test
SECONDS_OF_KERNELS = 180.0  # limit for an engine with the kernels in an interpreter
PROGRAM = "milestones/course/student/engine_answers.py"
KERNELS = "kernels.py"  # the engine calls these functions on a GPU only


class BreakError(Exception):
    """The mistake could not be tried. The message says why."""


REFUSALS = (CatalogError, RunnerError, BreakError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones break`."""
    parser.add_argument("exercise", help="the id of an exercise: m3.2")


def main(args: argparse.Namespace, root: Path = ROOT, runner: Runner | None = None) -> int:
    """Try the mistake, and show its effect."""
    console = Console(record=True)
    exercise = find(args.exercise, root)
    question, answer = exercise.part("Break it", root)
    if not question:
        raise BreakError(f"the handout has no *Break it* for {exercise.id}")
    console.print(Markdown(f"**{exercise.id}, Break it.** {question}"))
    with nullcontext(runner) if runner else Runner() as server:
        if patches_of(exercise.milestone, root).is_file():
            effect = of_patch(exercise, root, server)
        else:
            effect = by_hand(exercise, root, server, console)
    console.export_text()  # what was recorded so far is not kept
    show_effect(console, effect)
    same = compared(console, exercise, effect)
    keep(root, exercise, console.export_text().strip())
    console.print(f"kept in {FILE}: say there why these tests fail", style="dim", highlight=False)
    if console.is_terminal and sys.stdin.isatty():
        console.print("\nEnter shows the handout's answer, Ctrl-C ends.", style="dim")
        sys.stdin.readline()
        console.print(Markdown(f"**The answer.** {answer}"))
    return 0 if same else 1


def keep(root: Path, exercise: Exercise, report: str) -> None:
    """Write a report into `ANSWERS.md`, once."""
    place_of_it = root, exercise.milestone, title_of(exercise), BREAK_IT
    block = f"```text\n{report}\n```"
    if block not in written(*place_of_it):
        write(*place_of_it, block)


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
        self.right: dict[str, dict[str, Any]] = {}  # the right answers, by writer

    def effect(self, exercise: Exercise) -> Effect:
        """Return what the mistake of an exercise does."""
        name = writer(exercise)
        if name not in self.right:
            self.right[name] = answers_of(exercise, self.tree, self.runner)
        mutant = find_mutant(exercise.milestone, exercise.mistake, self.root)
        with self.mutants.applied(mutant, self.tree) as refusal:
            if refusal is not None:
                raise BreakError(f"{mutant.name} does not apply: {refusal}")
            run = self.runner.run(self.tree, exercise.tests, seconds=SECONDS)
            return Effect(run, self.right[name], answers_of(exercise, self.tree, self.runner))


def by_hand(exercise: Exercise, root: Path, runner: Runner, console: Console) -> Effect:
    """Wait until the student has made the mistake, try it, and put the files back."""
    console.print(f"\nDo not change {exercise.id} yet: first your own code is tested.")
    said = "testing your own code first"
    folder = root / place(exercise.milestone)
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    with console.status(f"{said} …") as status:
        passes = runner.run(
            root, exercise.tests, seconds=SECONDS,
            on_result=counting(status, said), on_import=importing(status, said),
        ).passed  # fmt: skip
        right = answers_of(exercise, root, runner) if passes else {}
    if not passes:
        raise BreakError(
            f"{exercise.id} does not pass yet. To see what fails:  "
            f"python -m milestones check {exercise.id}"
        )
    if any(path.read_bytes() != data for path, data in before.items() if path.exists()):
        raise BreakError("you have changed your code too early: put it back, and run this again")
    with put_back(folder, root / FOLDER / f"{exercise.id}.mistake"):
        console.bell()
        console.print(
            "It passes. [bold]Now[/] make the mistake in an editor, in another window "
            f"({', '.join(exercise.sources)}), and save the file. Your version comes back after "
            "the run, or with Ctrl-C.", soft_wrap=True,
        )  # fmt: skip
        saved = changes([folder])
        next(saved)
        try:
            next(saved)
            while error := syntax_error(root, exercise.milestone):
                console.print(f"{error.where}: {error.message}", style="red")
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
    file = tree / ANSWERS
    file.unlink(missing_ok=True)
    seconds = SECONDS_OF_KERNELS if runs_kernels(exercise) else SECONDS
    runner.run(tree, [writer(exercise)], seconds=seconds)
    found: dict[str, Any] = {}
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    unwritten = any("NotImplementedError" in str(r["error"]) for r in found.values())
    return {} if unwritten else found


def writer(exercise: Exercise) -> str:
    """Return the test that writes the answers of the engine."""
    name = "test_answers_of_kernels" if runs_kernels(exercise) else "test_answers"
    return f"{PROGRAM}::{name}[{exercise.milestone}]"


def runs_kernels(exercise: Exercise) -> bool:
    """Return whether an exercise is about functions that the engine calls on a GPU only."""
    return any(symbol.startswith(f"{KERNELS}:") for symbol in exercise.symbols)
