"""Show the next hint of an exercise. There are three hints, from a small one to nearly the answer.

The console remembers how many hints it has shown. `--all` shows those again, and no new one.

Exit status: 0, also when no hint is left; 2 there is no such exercise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..catalog import CatalogError, find
from ..delta import ROOT
from .progress import load_progress, save_progress

EXAMPLE = "python -m milestones hint m3.2"
REFUSALS = (CatalogError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones hint`."""
    parser.add_argument("exercise", help="the id of an exercise: m3.2")
    parser.add_argument("--all", action="store_true", help="show the hints so far again")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Show a hint, and remember that it was shown."""
    console = Console()
    exercise = find(args.exercise, root)
    progress = load_progress(root)
    given = min(progress.hints.get(exercise.id, 0), len(exercise.hints))
    console.print(Text.assemble((exercise.id, "bold"), f" {exercise.title}"))
    numbers = range(given) if args.all else range(given, min(given + 1, len(exercise.hints)))
    for number in numbers:
        console.print(f"\nhint {number + 1} of {len(exercise.hints)}", style="dim", highlight=False)
        console.print(Padding(Text(exercise.hints[number]), (0, 0, 0, 2), expand=False))
    if not numbers:
        console.print(
            "no hint was shown yet" if args.all else
            f"all {len(exercise.hints)} hints were shown: read them again with --all, and then "
            f"the handout, {exercise.section}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    elif not args.all:
        progress.hints[exercise.id] = given + 1
        save_progress(root, progress)
    return 0
