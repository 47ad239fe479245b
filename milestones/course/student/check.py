"""Run the exercises in order. For the first one that fails, show what was called, what was returned
and what was expected.

Exit status: 0 all exercises pass; 1 one fails or is not written; 2 the tests could not be run.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.status import Status

from ...chain import course_place, find_engine, is_elective, place
from ..catalog import CatalogError, find, load, taught_engines
from ..delta import ROOT
from ..exercise import Exercise
from ..release.cut import still_cut
from ..testing.results import Result
from ..testing.runner import Runner, RunnerError
from ..testing.supervised_run import SECONDS, SECONDS_PLAIN
from .attempt import Attempt, not_written, standing
from .check_screen import show_attempts, show_syntax_error
from .own_code import caller_of
from .progress import load_progress, note_result
from .watch import changes, syntax_error

EXAMPLE = "python -m milestones check m3.2 --watch"
REFUSALS = (ValueError, RunnerError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones check`."""
    parser.add_argument(
        "target", nargs="?", help="m3 or m3.2: a milestone or an exercise; default: your milestone"
    )
    parser.add_argument("--watch", action="store_true", help="check again when a file is saved")
    parser.add_argument("--trace", action="store_true", help="also show Python's traceback")
    parser.add_argument(
        "--debug", action="store_true",
        help="run the first test that fails again with this terminal: for prints, breakpoint()",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float,
        help="limit for each test (default: "
        f"{SECONDS_PLAIN:g} for tests without torch, {SECONDS:g} for others)",
    )  # fmt: skip


def main(args: argparse.Namespace, root: Path = ROOT, runner: Runner | None = None) -> int:
    """Check once, or with --watch until Ctrl-C."""
    console = Console()
    exercises = chosen(args.target, root)
    with nullcontext(runner) if runner else Runner() as server:
        if not args.watch:
            return check_once(exercises, args, root, server, console)
        return watch(exercises, args, root, server, console)


def chosen(target: str | None, root: Path) -> tuple[Exercise, ...]:
    """Return the exercises to check. Without a target: those of the student's own milestone."""
    target = target and target.lower()  # M3.2
    if target is not None and "." in target:
        return (find(target, root),)
    milestone = own_milestone(root) if target is None else find_engine(target, root)
    return load(milestone, root, strict=False)


def own_milestone(root: Path) -> str:
    """Return the milestone of a student's tree, or else the highest milestone with exercises."""
    names = taught_engines(root)
    if not names:
        raise CatalogError("no milestone of this tree has exercises")
    started = [name for name in names if (root / course_place(name) / "start").is_dir()]
    return (started or [name for name in names if not is_elective(name)] or names)[-1]


def check_once(
    exercises: tuple[Exercise, ...], args: argparse.Namespace, root: Path, runner: Runner,
    console: Console,
) -> int:  # fmt: skip
    """Run the exercises up to the first that fails, and show them. Return the exit status."""
    if error := syntax_error(root, exercises[0].milestone):
        show_syntax_error(console, error)
        return 1
    attempts = []
    for attempt in attempted(exercises, root, runner, args.seconds, console):
        attempts.append(attempt)
        if attempt.absent or (attempt.run is not None and not attempt.run.error):
            note_result(root, attempt.exercise.id, attempt.state == "passed")
    show_attempts(console, attempts, trace=args.trace)
    failed = next((a.run.first_failure for a in attempts if a.run and not a.run.passed), None)
    if args.debug and failed is not None:
        debug(failed.node, root, console)
    own = load(exercises[0].milestone, root, strict=False)
    console.print(standing(own, load_progress(root)), style="dim", highlight=False)
    if any(attempt.run is not None and attempt.run.error for attempt in attempts):
        return 2
    return 0 if all(attempt.state == "passed" for attempt in attempts) else 1


def debug(test: str, root: Path, console: Console) -> None:
    """Run one test as pytest alone does, with this terminal for prints and `breakpoint()`."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--tb=short", "-o", "addopts=", test]
    console.print(f"\n[bold]{test}[/], again with this terminal", highlight=False)
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=root, check=False)


def attempted(
    exercises: tuple[Exercise, ...], root: Path, runner: Runner, seconds: float | None,
    console: Console,
) -> Iterator[Attempt]:  # fmt: skip
    """Yield each exercise with its results. Those after the first failure are not run.

    The tests of an exercise that is not written at all are not run either: all of them would fail.
    """
    own = load(exercises[0].milestone, root, strict=False)
    stopped = False
    for exercise in exercises:
        if stopped:
            yield Attempt(exercise)
            continue
        cut = still_cut(exercise, root)
        if absent := not_written(exercise, own, root):
            stopped = True
            yield Attempt(exercise, unwritten=cut, absent=absent)
            continue
        said = f"{exercise.id} {exercise.title}"
        with console.status(said) as status:
            run = runner.run(
                root, exercise.tests, seconds=seconds, stop_at_timeout=True,
                on_result=counting(status, said), on_import=importing(status, said),
            )  # fmt: skip
        stopped = not run.passed
        first = run.first_failure
        yield Attempt(exercise, run, cut, caller_of(first.failure if first else None, own, root))


def counting(status: Status, said: str) -> Callable[[Result], None]:
    """Return a function that counts results on the screen, so that a long wait is not silent."""
    numbers = itertools.count(1)
    return lambda result: status.update(f"{said}: {next(numbers)} tests done")


def importing(status: Status, said: str) -> Callable[[str], None]:
    """Return a function that shows which library is being imported."""
    return lambda library: status.update(f"{said}: importing {library} …")


def watch(
    exercises: tuple[Exercise, ...], args: argparse.Namespace, root: Path, runner: Runner,
    console: Console,
) -> int:  # fmt: skip
    """Check again whenever a source of the milestone or a test is saved, until Ctrl-C."""
    status = 1
    folders = [root / place(exercises[0].milestone), root / "tests"]
    try:
        for _ in changes(folders):
            if console.is_terminal:
                console.clear()
            status = check_once(exercises, args, root, runner, console)
            watched = f"watching {place(exercises[0].milestone)}/"
            said = f"{watched}: save a file to check again, press Ctrl-C to stop"
            console.print(said, style="dim", highlight=False)
    except KeyboardInterrupt:
        console.print()
    return status
