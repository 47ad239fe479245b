"""`python -m milestones diff m2 m3`: the lesson between two rungs, symbol by symbol.

What is unchanged, or has only moved, is hidden; each difference stands under its reason. Colours
where a person reads, a plain diff where it is piped.

Exit status: 0 it was shown; 2 there is no such rung or symbol, or it does not differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ..delta import ROOT
from . import lesson_text
from .lesson import Lesson, choose, lesson
from .lesson_html import page

EXAMPLE = """python -m milestones diff m2 m3
              python -m milestones diff m2 m3 --symbol Scheduler.schedule --side-by-side
              python -m milestones diff m2 m3 --html m2-m3.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m milestones diff`."""
    parser.add_argument("below", help="the lower rung, in short or by its whole name")
    parser.add_argument("above", help="the higher rung")
    parser.add_argument(
        "--symbol", metavar="S", help="one symbol, or one file: Scheduler.schedule, scheduler.py"
    )
    parser.add_argument("--side-by-side", action="store_true", help="two columns")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no net")
    output.add_argument("--json", action="store_true", help="the tour as data")
    parser.set_defaults(root=ROOT)


def main(args: argparse.Namespace) -> int:
    """Show the lesson; the exit status."""
    try:
        found = lesson(args.below, args.above, args.root)
        if args.symbol:
            found = choose(found, args.symbol)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.html:
        args.html.write_text(page(found), encoding="utf-8")
        sys.stderr.write(f"{args.html}: {len(found.stops)} stops\n")
        return 0
    if args.json:
        sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")
        return 0
    _show(found, columns=args.side_by_side)
    return 0


def _show(found: Lesson, *, columns: bool) -> None:
    console = Console()
    if console.is_terminal:
        lesson_text.show(found, console, columns=columns)
        return
    lines = lesson_text.plain_columns(found, console.width) if columns else lesson_text.plain(found)
    sys.stdout.writelines(f"{line}\n" for line in lines)
