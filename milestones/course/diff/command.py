"""`python -m milestones diff m2 m3`: show the lesson between two milestones, symbol by symbol.

Each difference stands under its reason. Code that is unchanged, or was only moved, is hidden. In a
terminal the output has colours. In a pipe it is a plain diff. A large lesson is divided into stops.
The command then shows a list of the stops, and `--stop` shows one of them. `--files` prints whole
files in the order of the stops. One name alone is compared with the milestone below it.

Exit status: 0 the lesson was shown; 2 there is no such milestone, stop or symbol, or it does not
differ.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from ...chain import ROOT, below, extending, find_engine, find_pair, own_name, sources
from ...console import ReportConsole
from .. import delta
from . import lesson_text
from .choose import choose, choose_stop
from .lesson import lesson
from .lesson_html import page, size

EXAMPLE = """python -m milestones diff m2 m3
              python -m milestones diff m3 --files
              python -m milestones diff m2 m3 --symbol Scheduler.schedule --side-by-side
              python -m milestones diff m2 m3 --html m2-m3.html"""
REFUSALS = (ValueError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones diff`."""
    parser.add_argument("below", help="the lower milestone: m2 or m2_continuous")
    parser.add_argument("above", nargs="?", help="the higher milestone")
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--symbol", metavar="S", help="only one symbol or file: Scheduler.schedule, scheduler.py"
    )
    part.add_argument(
        "--stop", metavar="S", help="one stop, by its number or a part of its title; or all"
    )
    part.add_argument(
        "--files", action="store_true", help="whole files, in reading order, without the demo"
    )
    parser.add_argument("--side-by-side", action="store_true", help="two columns")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page to FILE")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Show the lesson. Return the exit status."""
    upper = args.above or args.below
    lower = args.below if args.above else lower_of(upper, root)
    if args.files:
        sys.stdout.writelines(f"{line}\n" for line in in_order(lower, upper, root))
        return 0
    found = lesson(lower, upper, root)
    if args.symbol:
        found = choose(found, args.symbol)
    elif args.stop not in (None, "all"):
        found = choose_stop(found, args.stop)
    if args.html:
        args.html.write_text(page(found, args.html.parent, root), encoding="utf-8")
        sys.stderr.write(f"{args.html}: {size(found)}\n")
        return 0
    if found.is_divided and args.stop is None and not args.symbol:
        sys.stdout.writelines(f"{line}\n" for line in lesson_text.overview(found))
        return 0
    lesson_text.show(found, ReportConsole(), columns=args.side_by_side)
    return 0


def in_order(lower: str, upper: str, root: Path = ROOT) -> Iterator[str]:
    """Yield the lines of a unified diff of whole files between two engines, as they are now.

    The files come in the order of the stops in `DELTA.toml`, and the other files follow. `diff -r`
    takes the order of the alphabet, so the lesson comes late. The demo is left out, because it only
    shows the lesson.

    Raises `ValueError` for a name that is no engine, and if `lower` is not below `upper`.
    """
    lower, upper = find_pair(lower, upper, root)
    old, new = sources(lower, root), sources(upper, root)
    all_new, below_files = extending(old, new), set(old.values())
    for name in _reading_order({**old, **new}, lower, upper, root):
        before, after = None if name in all_new else old.get(name), new.get(name)
        # An elective has `m5_scheduler.py` besides its own file, and takes other files as they are.
        if (own_name(name) != name and after in below_files) or before == after:
            continue
        yield from difflib.unified_diff(
            _lines(before),
            _lines(after),
            _label(before, root),
            _label(after, root),
            lineterm="",
        )


def lower_of(upper: str, root: Path = ROOT) -> str:
    """Return the milestone directly below one. Raises `ValueError` for the lowest."""
    lower = below(find_engine(upper, root), root)
    if lower is None:
        raise ValueError(f"{upper} is the lowest milestone; name two")
    return lower


def _reading_order(files: dict[str, Path], lower: str, upper: str, root: Path) -> list[str]:
    """Return the names of the files: those of the first stop first, and those of no stop last."""
    stops = delta.declared(upper, root).stops if below(upper, root) == lower else {}
    of_stops = [entry.partition(":")[0] for entries in stops.values() for entry in entries]
    first = [name for name in dict.fromkeys(of_stops) if name in files]
    rest = [name for name in sorted(files) if name not in first]
    return [name for name in (*first, *rest) if not name.startswith("demo/")]


def _lines(path: Path | None) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path else []


def _label(path: Path | None, root: Path) -> str:
    return path.relative_to(root).as_posix() if path else "/dev/null"
