"""Put one exercise back to its starting state. Your version is kept in a file beside it.

Only the functions of this exercise change. All other code that you wrote in the file stays.
`--undo` puts your last version of these functions back in the same way.

Exit status: 0 done, or there was nothing to do; 2 it could not be done.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ...chain import place
from ..catalog import CatalogError, find
from ..delta import ROOT
from ..exercise import Exercise
from .progress import note_result
from .put_back import ResetError, put_back

EXAMPLE = "python -m milestones reset m3.2"
REFUSALS = (CatalogError, ResetError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones reset`."""
    parser.add_argument("exercise", help="the id of an exercise: m3.2")
    parser.add_argument("--undo", action="store_true", help="put your last version back")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Reset the exercise, and show where the old version is."""
    console = Console()
    exercise = find(args.exercise, root)
    backups = undo(exercise, root) if args.undo else reset(exercise, root)
    for line in told(exercise, backups, undone=args.undo):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def told(exercise: Exercise, backups: dict[str, str], *, undone: bool) -> list[str]:
    """Return what was done, and how to get back what was there before."""
    if not backups:
        there = "as in your last version" if undone else "in its starting state"
        return [f"{exercise.id} is {there} already"]
    done = "is your last version again" if undone else "starts again"
    lines = [f"{file}: {exercise.id} {done}; the text before is {backup}"
             for file, backup in backups.items()]  # fmt: skip
    back = "to swap the two versions again" if undone else "to get these functions back"
    return [
        *lines,
        f"{back}:  python -m milestones reset {exercise.id} --undo",
        "Only these functions changed: imports and helpers that you have added stay.",
    ]


def reset(exercise: Exercise, root: Path) -> dict[str, str]:
    """Put the functions of an exercise back. Return the backup's name for each changed file."""
    originals = {}
    for name in exercise.sources:
        inside = name.removeprefix(f"{place(exercise.milestone)}/")
        start = root / exercise.start / f"{inside}.txt"
        if not start.is_file():
            raise ResetError(
                "this tree has no starting states: only one that `release` has made can be reset"
            )
        if not (root / name).is_file():
            raise ResetError(f"{name} is missing:  cp {start.relative_to(root)} {name}")
        originals[name] = start.read_text("utf-8")
    return exchange(exercise, originals, root)


def undo(exercise: Exercise, root: Path) -> dict[str, str]:
    """Put the functions of the newest backup back. Return the backup's name for each changed file.

    What the student wrote in these files since the reset stays.
    """
    newest = {name: backups_of(exercise, root / name)[-1:] for name in exercise.sources}
    originals = {name: found[0].read_text("utf-8") for name, found in newest.items() if found}
    if not originals:
        raise ResetError(f"there is no earlier version of {exercise.id}: it was never reset")
    return exchange(exercise, originals, root)


def exchange(exercise: Exercise, originals: dict[str, str], root: Path) -> dict[str, str]:
    """Take the functions of an exercise from other versions of their files. Keep backups."""
    changed: dict[str, str] = {}
    for name, original in originals.items():
        source = text = (root / name).read_text("utf-8")
        for symbol in exercise.symbols:
            file, _, qualified = symbol.partition(":")
            if name != f"{place(exercise.milestone)}/{file}":
                continue
            try:
                text = put_back(text, original, qualified, name)
            except SyntaxError as error:
                raise ResetError(
                    f"{name}:{error.lineno} has a syntax error ({error.msg}). Correct it, or reset "
                    f"the whole file with all its exercises:  cp {exercise.start}/{file}.txt {name}"
                ) from error
        if text != source:
            changed[name] = text
    backups = {}
    for name, text in changed.items():
        backup = free_name(root / f"{name}.{exercise.id}.bak")
        backup.write_bytes((root / name).read_bytes())
        (root / name).write_text(text, encoding="utf-8")
        backups[name] = backup.relative_to(root).as_posix()
    if backups:
        note_result(root, exercise.id, passed=None)
    return backups


def backups_of(exercise: Exercise, path: Path) -> list[Path]:
    """Return the earlier versions of a file that `reset` has kept for an exercise, oldest first."""
    return [other for other in names_of(path.with_name(f"{path.name}.{exercise.id}.bak"))
            if other.exists()]  # fmt: skip


def free_name(path: Path) -> Path:
    """Return the path, with a number if there is already such a file."""
    return next(name for name in names_of(path) if not name.exists())


def names_of(path: Path) -> list[Path]:
    """Return the path without a number, and with the numbers from 2 on."""
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(2, 1000))]
