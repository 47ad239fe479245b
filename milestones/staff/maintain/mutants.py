"""`python -m milestones mutants`: check that the tests catch the mistakes that students make.

`milestones/<milestone>/mutants.patch` has the mutants of its exercises, and the files of
`wrong_solutions/` beside it have solutions that are wrong as a whole. Each is applied to a copy of
the sources. Then the test that it names must fail; without the patch, the same test must pass. The
working tree is never changed.

Exit status: 0 every mutant is killed; 1 a mutant survives, does not apply, or proves nothing;
2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from ...chain import course_place, find_engine, milestones, place
from ...console import wide_console
from ...course import catalog
from ...course.delta import ROOT
from ...course.exercise import Mutant
from ...course.testing.results import Run
from ...course.testing.runner import Runner, RunnerError

EXAMPLE = """python -m milestones mutants
              python -m milestones mutants m3 --exercise m3.2"""
SECONDS = 20.0  # limit for each test of a mutant
LITTER = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


@dataclass(frozen=True)
class Fate:
    """The result for one mutant.

    state: killed, survived (the test passes), stale (the patch does not apply), broken (the mutant
    cannot be imported, so it proves nothing), or red (the test fails without the patch too).
    """

    mutant: Mutant
    state: str
    words: str = ""
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones mutants`."""
    parser.add_argument("milestone", nargs="?", help="m3 or m3_paged; default: all")
    parser.add_argument("--exercise", metavar="ID", help="only the mutants of one exercise: m3.2")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(root=ROOT)


def main(args: argparse.Namespace) -> int:
    """Try the mutants and report. Return the exit status."""
    try:
        chosen = choose(args.milestone, args.exercise, args.root)
        with Runner() as runner:
            found = fates_of(chosen, runner, args.root)
            fates = list(found) if args.json else list(_shown(found))
    except (ValueError, RunnerError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.json:
        rows = [
            {
                "milestone": fate.mutant.milestone, "name": fate.mutant.name,
                "exercise": fate.mutant.exercise, "killed_by": fate.mutant.killed_by,
                "state": fate.state, "words": fate.words, "seconds": round(fate.seconds, 3),
            }
            for fate in fates
        ]  # fmt: skip
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        _report(fates)
    return 0 if all(fate.state == "killed" for fate in fates) else 1


def choose(milestone: str | None, exercise: str | None, root: Path = ROOT) -> list[Mutant]:
    """Return the chosen mutants. Raises `ValueError` for unknown names."""
    if exercise:
        owner = catalog.find(exercise, root).milestone
        if milestone and find_engine(milestone, root) != owner:
            raise ValueError(f"{exercise} is an exercise of {owner}, not of {milestone}")
        names = [owner]
    else:
        names = [find_engine(milestone, root)] if milestone else catalog.taught_engines(root)
    found: list[Mutant] = []
    for name in names:
        found += catalog.mutants(name, root) + catalog.wrong_solutions(name, root)
    return [mutant for mutant in found if exercise in (None, mutant.exercise)]


def fates_of(mutants: Iterable[Mutant], runner: Runner, root: Path = ROOT) -> Iterator[Fate]:
    """Try the mutants one after the other, in a copy that is restored after each of them."""
    mutants = list(mutants)
    if not mutants:
        return
    with tempfile.TemporaryDirectory(prefix="ladder-mutants-") as folder:
        tree = copy(root, Path(folder).resolve() / "tree")
        healthy = _failing(runner, tree, {mutant.killed_by for mutant in mutants})
        for mutant in mutants:
            if (why := healthy[mutant.killed_by]) is not None:
                yield Fate(mutant, "red", f"the test fails without the patch: {why}")
            else:
                yield _fate(mutant, runner, tree)


def copy(root: Path, tree: Path) -> Path:
    """Copy the parts of a tree that the tests of exercises need."""
    tree.mkdir(parents=True)
    for name in ("common", "tests", "milestones", *milestones(root)):
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=LITTER)
    if (root / "pyproject.toml").exists():
        shutil.copyfile(root / "pyproject.toml", tree / "pyproject.toml")
    return tree


def _fate(mutant: Mutant, runner: Runner, tree: Path) -> Fate:
    started = time.monotonic()

    def fate(state: str, words: str = "") -> Fate:
        return Fate(mutant, state, words, time.monotonic() - started)

    with applied(mutant, tree) as refusal:
        if refusal is not None:
            return fate("stale", refusal)
        run = runner.run(tree, [mutant.killed_by], seconds=SECONDS)
    if run.error:
        return fate("broken", run.error)
    for result in run.results:
        if result.outcome == "error" and "::" not in result.node:
            message = result.failure.message if result.failure else ""
            return fate("broken", f"{result.node} cannot be imported: {message}")
    first = run.first_failure
    if first is None:
        return fate("survived", f"{mutant.killed_by} passes")
    return fate("killed", _why(run))


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[str | None]:
    """Apply a mutant's patch to the tree. Yields Git's error if the patch does not apply."""
    before = {path: path.read_bytes() for path in (tree / place(mutant.milestone)).rglob("*.py")}
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"], cwd=tree, env=environment,
        input=mutant.patch.encode(), capture_output=True,
    )  # fmt: skip
    try:
        yield done.stderr.decode().strip() or None if done.returncode else None
    finally:
        after = set((tree / place(mutant.milestone)).rglob("*.py"))
        for path in after - before.keys():
            path.unlink()
        for path, data in before.items():
            if path not in after or path.read_bytes() != data:
                path.write_bytes(data)


def _failing(runner: Runner, tree: Path, tests: set[str]) -> dict[str, str | None]:
    """Run all tests at once. Return for each test why it fails, or None if it passes."""
    run = runner.run(tree, sorted(tests), seconds=SECONDS)
    found: dict[str, str | None] = {}
    for test in tests:
        own = tuple(result for result in run.results if result.node.partition("[")[0] == test)
        part = Run(own, run.error)
        found[test] = None if part.passed else _why(part)
    return found


def _why(run: Run) -> str:
    first = run.first_failure
    if first is None:
        return run.error or "no test was run"
    failure = first.failure
    if failure is None:
        return first.outcome
    words = failure.message or failure.explanation
    if not words and failure.returned:
        words = f"{failure.called} gave {failure.returned}, not {failure.expected}"
    return f"{failure.kind}: {words.splitlines()[0]}" if words else failure.kind


def _shown(fates: Iterable[Fate]) -> Iterator[Fate]:
    """Print each fate in a line as soon as it is known."""
    console = wide_console()
    for fate in fates:
        style = "green" if fate.state == "killed" else "bold red"
        line = Text(f"{fate.mutant.exercise:6} ").append(f"{fate.state:9}", style)
        console.print(line.append(f"{fate.seconds:5.1f} s  {fate.mutant.name}"))
        yield fate


def _report(fates: list[Fate]) -> None:
    console = wide_console()
    for fate in fates:
        if fate.state != "killed":
            folder = course_place(fate.mutant.milestone)
            console.print(f"{folder}: {fate.mutant.name}: {fate.state}: {fate.words}")
    killed = sum(fate.state == "killed" for fate in fates)
    console.print(f"{killed} of {len(fates)} killed" if fates else "there are no mutants")
