"""Put one exercise back to its starting state. Your version is kept in a file beside it.

Only the functions of this exercise change. All other code that you wrote in the file stays.

Exit status: 0 done, or there was nothing to do; 1 it could not be done; 2 there is no such
exercise.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from rich.console import Console

from ..delta import ROOT
from ..exercise import Exercise
from ..record import RecordError, find
from ..release.cut import body_span, functions, span_of
from .progress import note_result

EXAMPLE = "python -m milestones reset m3.2"


class ResetError(Exception):
    """The exercise cannot be reset. The message says why. Nothing was changed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones reset`."""
    parser.add_argument("exercise", help="the id of an exercise: m3.2")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Reset the exercise, and show where the old version is."""
    console = Console()
    try:
        exercise = find(args.exercise, root)
    except RecordError as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 2
    try:
        backups = reset(exercise, root)
    except ResetError as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 1
    if not backups:
        console.print(f"{exercise.id} is in its starting state already", highlight=False)
    for file, backup in backups.items():
        said = f"{file}: {exercise.id} starts again; your version is {backup}"
        console.print(said, highlight=False, soft_wrap=True)
        console.print(f"to get it back:  cp {backup} {file}", highlight=False, soft_wrap=True)
    if backups:
        said = "Only these functions changed: imports and helpers that you have added stay."
        console.print(said, style="dim", highlight=False, soft_wrap=True)
    return 0


def reset(exercise: Exercise, root: Path) -> dict[str, str]:
    """Put the functions of an exercise back. Return the backup's name for each changed file."""
    changed: dict[str, str] = {}
    for name in exercise.sources:
        inside = name.partition("/")[2]
        start = root / "milestones" / exercise.milestone / "start" / f"{inside}.txt"
        if not start.is_file():
            raise ResetError(
                "this tree has no starting states: only one that `release` has made can be reset"
            )
        if not (root / name).is_file():
            raise ResetError(f"{name} is missing:  cp {start.relative_to(root)} {name}")
        source, original = (root / name).read_text("utf-8"), start.read_text("utf-8")
        text = source
        for symbol in exercise.symbols:
            file, _, qualified = symbol.partition(":")
            if file == inside:
                text = put_back(text, original, qualified, name)
        if text != source:
            changed[name] = text
    backups = {}
    for name, text in changed.items():
        backup = free_name(root / f"{name}.{exercise.id}.bak")
        backup.write_bytes((root / name).read_bytes())
        (root / name).write_text(text, encoding="utf-8")
        backups[name] = backup.relative_to(root).as_posix()
    if backups:
        note_result(root, exercise.id, passed=False)
    return backups


def put_back(source: str, original: str, symbol: str, name: str) -> str:
    """Return a source in which a function is as in the original.

    A function that was deleted is put back in its class, after the function that precedes it.
    """
    there, wanted = definitions(source, name), definitions(original, name)
    lines, block = source.splitlines(), wanted[symbol]
    if symbol in there:
        first, last = there[symbol][0], there[symbol][1]
        lines[first - 1 : last] = original.splitlines()[block[0] - 1 : block[1]]
        return "\n".join(lines) + "\n"
    order = list(wanted)
    before = [other for other in order[: order.index(symbol)] if other in there]
    same = [other for other in before if other.partition(".")[0] == symbol.partition(".")[0]]
    if "." in symbol and not same:
        raise ResetError(f"{name} has no class for {symbol} any more: put the class back first")
    at = there[(same or before)[-1]][1] if same or before else len(lines)
    gap = [""] if "." in symbol else ["", ""]
    lines[at:at] = [*gap, *original.splitlines()[block[0] - 1 : block[1]]]
    return "\n".join(lines) + "\n"


def definitions(source: str, name: str) -> dict[str, tuple[int, int]]:
    """Return the first and last line of each function, with decorators and the comments above."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        folder, _, file = name.partition("/")
        raise ResetError(
            f"{name}:{error.lineno} has a syntax error ({error.msg}). Correct it, or reset the "
            f"whole file with all its exercises:  cp milestones/{folder}/start/{file}.txt {name}"
        ) from error
    lines = source.splitlines()
    found: dict[str, tuple[int, int]] = {}
    previous = None
    for symbol, node in functions(tree):
        first, last = span_of(node, lines).first, body_span(node, lines).last
        if symbol == previous:  # a property and its setter are neighbours with the same name
            first = found[symbol][0]
        found[symbol], previous = (first, last), symbol
    return found


def free_name(path: Path) -> Path:
    """Return the path, with a number if there is already such a file."""
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(2, 1000))]
    return next(name for name in names if not name.exists())
