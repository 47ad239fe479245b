"""Measure what a milestone is about: one table, with the place where it bends.

    m1  the time of a step against the context, with the cache and without
    m2  the time of a step against the rows of a batch; --static: static batches beside (counters)
    m3  the requests that fit in one pool against the page size (counters);
        --chunks: time to first token and the gaps of others against the tokens of a step
        --workload: the table of the handout; --picture FILE: your pages over time, as an SVG
    m4  the share of prompt tokens that are reused against the size of the pool (counters);
        --shared: the KV that requests with a common prefix read
    m5  the time of a step against the time of the forward, serial and overlapped

Read "Measure it" in the handout first, and write down what you expect. Counters are the same on
every machine. Of times, compare only ratios of one run.

Exit status: 0 the table was shown; 2 there is no such milestone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...chain import find_engine, short
from ..delta import ROOT
from .measurements import MEASUREMENTS, MORE
from .workload_run import draw

EXAMPLE = "python -m milestones measure m3"
REFUSALS = (ValueError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones measure`."""
    parser.add_argument("milestone", help="a milestone: m3")
    parser.add_argument("--model", help="default: that of the handout")
    for name, (engine, about, _) in MORE.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"{engine}: {about}")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="m3: draw the pages over time as an SVG"
    )
    parser.add_argument("--runs", type=int, help="invariance: how often the prompt is asked")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Measure, and show the table."""
    console = Console()
    milestone = find_engine(args.milestone, root)
    chosen = MEASUREMENTS[short(milestone)]
    for option, (own, _, more) in MORE.items():
        if getattr(args, option):
            if short(milestone) != own:
                raise ValueError(f"--{option} measures {own}, and no other engine")
            chosen = more
    if args.runs is not None:
        if short(milestone) != "invariance":
            raise ValueError("--runs is for invariance, and no other engine")
        chosen = replace(chosen, sizes=(args.runs,))
    model = args.model or chosen.model
    if args.picture:
        if short(milestone) != "m3":
            raise ValueError("--picture draws the pages of m3, and no other engine")
        draw(milestone, model, args.picture)
        console.print(f"{args.picture}: open it in a browser", highlight=False, soft_wrap=True)
        return 0
    table = Table(*chosen.columns, box=None, padding=(0, 1), header_style="dim")
    with console.status("measuring …"):
        for row in chosen.rows(milestone, model, chosen.sizes):
            table.add_row(*row)
    console.print(f"{milestone}, {model}", style="bold", highlight=False)
    console.print(table)
    console.print(f"\n{chosen.conclusion}", highlight=False)
    return 0
