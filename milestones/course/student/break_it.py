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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from ...chain import place
from ..catalog import CatalogError, find, find_mutant, patches_of
from ..delta import ROOT
from ..exercise import Exercise
from ..testing.results import Run
from ..testing.runner import Runner, RunnerError
from .progress import ANSWERS, FOLDER
from .watch import changes, syntax_error

EXAMPLE = "python -m milestones break m3.2"
SECONDS = 20.0  # limit for each test
PROGRAM = "milestones/course/student/engine_answers.py"


@dataclass(frozen=True)
class Effect:
    """What a mistake does: to the tests of its exercise, and to the answers of an engine."""

    run: Run
    right: dict[str, Any]  # the results of `engine_answers.py`, without the mistake
    wrong: dict[str, Any]  # and with it; both empty if the engine is not complete

    @property
    def red(self) -> tuple[str, ...]:
        """The names of the tests that fail, without parameters, in order."""
        nodes = (r.node.rpartition("::")[2].partition("[")[0] for r in self.run.failures)
        return tuple(dict.fromkeys(nodes))

    @property
    def answers(self) -> str:
        """Whether the answers are "right", "wrong", or the engine "stops"."""
        if any(result["error"] for result in self.wrong.values()):
            return "stops"
        same = all(self.wrong[s]["answers"] == r["answers"] for s, r in self.right.items())
        return "right" if same else "wrong"


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
    question, _ = exercise.part("Break it", root)
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


def show_effect(console: Console, effect: Effect) -> None:
    """Print the tests that fail, then what changes in the run of an engine."""
    results = effect.run.results
    failures = effect.run.failures
    console.print(f"\n{len(failures)} of {len(results)} tests fail:", highlight=False)
    for result in failures:
        failure = result.failure
        why = (failure.message or failure.explanation or failure.kind) if failure else ""
        name = result.node.rpartition("::")[2]
        console.print(Text.assemble("  ", (name, "bold red")))
        console.print(Text(f"      {why.splitlines()[0] if why else result.outcome}", style="dim"))
    if not effect.right:
        console.print("\nThe whole engine is not written yet, so there are no answers to compare.")
        return
    for stream, right in effect.right.items():
        console.print()
        show_run(console, stream, right, effect.wrong.get(stream, {}))


def show_run(console: Console, stream: str, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Print the answers of a run that differ, and its counters that differ."""
    where = f" {stream}" if stream else ""
    if wrong.get("error"):
        console.print(f"The engine{where} stops: {wrong['error']}", style="red", highlight=False)
        return
    differ = [n for n, tokens in right["answers"].items() if wrong["answers"].get(n) != tokens]
    count = len(right["answers"])
    if not differ:
        console.print(f"The engine{where} gives all {count} answers as before.", highlight=False)
    else:
        said = f"The engine{where} gives {len(differ)} of {count} answers wrong:"
        console.print(said, style="red", highlight=False)
        table = Table("request", "right", "wrong", box=None, padding=(0, 2), header_style="dim")
        for name in sorted(differ):
            one, other = right["answers"][name], wrong["answers"].get(name, [])
            table.add_row(name, marked(one, other, "green"), marked(other, one, "red"))
        console.print(table)
    for name, value in right["counters"].items():
        if wrong["counters"][name] != value:
            console.print(f"  {name}: {value} before, {wrong['counters'][name]} now")


def marked(tokens: list[int], other: list[int], style: str) -> Text:
    """Return tokens with a colour from the first place on where they differ from others."""
    pairs = zip(tokens, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other)))
    words = [" ".join(map(str, part)) for part in (tokens[:same], tokens[same:])]
    return Text.assemble(words[0], " " if words[0] else "", (words[1], style))
