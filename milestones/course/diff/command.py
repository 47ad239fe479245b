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
import sys
from pathlib import Path

from ...console import ReportConsole
from ..delta import ROOT
from . import lesson_text
from .choose import choose, choose_stop
from .in_order import in_order, lower_of
from .lesson import lesson
from .lesson_html import page, size

EXAMPLE = """python -m milestones diff m2 m3
              python -m milestones diff m3 --files
              python -m milestones diff m2 m3 --symbol Scheduler.schedule --side-by-side
              python -m milestones diff m2 m3 --html m2-m3.html"""


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
    parser.set_defaults(root=ROOT)


def main(args: argparse.Namespace) -> int:
    """Show the lesson. Return the exit status."""
    try:
        above = args.above or args.below
        below = args.below if args.above else lower_of(above, args.root)
        if args.files:
            sys.stdout.writelines(f"{line}\n" for line in in_order(below, above, args.root))
            return 0
        found = lesson(below, above, args.root)
        if args.symbol:
            found = choose(found, args.symbol)
        elif args.stop not in (None, "all"):
            found = choose_stop(found, args.stop)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.html:
        args.html.write_text(page(found), encoding="utf-8")
        sys.stderr.write(f"{args.html}: {size(found)}\n")
        return 0
    if found.is_divided and args.stop is None and not args.symbol:
        sys.stdout.writelines(f"{line}\n" for line in lesson_text.overview(found))
        return 0
    lesson_text.show(found, ReportConsole(), columns=args.side_by_side)
    return 0
