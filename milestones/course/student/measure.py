"""Measure what a milestone is about: one table, with the place where it bends.

    m1  the time of a step against the context, with the cache and without
    m2  the time of a step against the rows of a batch; --static: static batches beside (counters)
    m3  the requests that fit in one pool against the page size (counters);
        --chunks: time to first token and the gaps of others against the tokens of a step
    m4  the share of prompt tokens that are reused against the size of the pool (counters);
        --shared: the KV that requests with a common prefix read
    m5  the time of a step against the time of the forward, serial and overlapped

Read "Measure it" in the handout first, and write down what you expect. Counters are the same on
every machine. Of times, compare only ratios of one run.

Exit status: 0 the table was shown; 2 there is no such milestone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import EMBEDDED_MODEL

from ...chain import find_engine, short
from ..delta import ROOT
from . import measure_counters as counters
from . import measure_electives as electives
from . import measure_times as times
from .measuring import TINY, Measurement

EXAMPLE = "python -m milestones measure m3"
REFUSALS = (ValueError,)
WINDOWED = "tiny-gemma3_text"  # random weights: the pages are counted, and the text means nothing
# More tables, each by the name of its option: the milestone, and what is measured.
MORE = {
    "static": ("m2", Measurement(
        ("rows", "batches", "forwards", "padding computed", "tokens per forward"),
        counters.by_batching, TINY, (1, 2, 4, 6, 8, 14),
    )),
    "chunks": ("m3", Measurement(
        ("tokens of a step", "TTFT, steps", "TTFT, ms", "most tokens in a step", "ITL at most, ms"),
        counters.by_chunk, TINY, (16, 32, 64, 128, 256, 512),
    )),
    "shared": ("m4", Measurement(
        ("prefix", "KV read, MB", "if read once, MB", "share"),
        counters.by_prefix, EMBEDDED_MODEL, (0, 64, 128, 256, 448),
    )),
}  # fmt: skip
MEASUREMENTS = {
    "m1": Measurement(
        ("context", "tokens fed, cache", "ms, cache", "tokens fed, no cache", "ms, no cache"),
        times.by_context, EMBEDDED_MODEL, (16, 64, 256, 480),
    ),
    "m2": Measurement(
        ("rows", "ms per step", "ms per token"),
        times.by_rows, EMBEDDED_MODEL, (1, 2, 4, 8, 16, 32, 64),
    ),
    "m3": Measurement(
        ("page size", "most running", "held, not written", "steps", "retractions"),
        counters.by_page_size, TINY, (1, 2, 4, 8, 16, 32, 64),
    ),
    "m4": Measurement(
        ("pages", "tokens", "reused", "prompt tokens computed"),
        counters.by_pool, TINY, (24, 32, 48, 64, 80, 96, 128, 192),
    ),
    "m5": Measurement(
        ("emulated ms", "h", "f", "h + f", "serial", "max(h, f)", "overlapped"),
        times.by_forward, TINY, (0, 1, 2, 4, 8, 16),
    ),
    "multi_step": Measurement(
        (
            "steps per plan", "tokens", "in vain", "share", "TTFT p50, ms", "TTFT p95, ms",
            "ITL p50, ms", "tokens/s",
        ),
        times.by_plan, TINY, (1, 2, 4, 8),
    ),
    "structured_output": Measurement(
        ("requests", "loop", "gap, ms", "tokens/s", "ratio"),
        times.by_grammar, EMBEDDED_MODEL, (1, 8),
    ),
    "speculative": Measurement(
        (
            "text", "requests", "steps, m5", "steps", "drafted", "accepted", "tokens/s, m5",
            "tokens/s", "ratio",
        ),
        times.by_text, EMBEDDED_MODEL, (1, 16),
    ),
    "lora": Measurement(
        ("adapters", "way", "steps", "ratio"), times.by_batch, EMBEDDED_MODEL, (8,),
    ),
    "hybrid_memory": Measurement(
        ("tokens", "layers alike", "most", "at the end", "share"),
        electives.by_length, WINDOWED, (32, 64, 128, 256, 480),
    ),
    "priority": Measurement(
        (
            "load", "engine", "urgent TTFT p50, steps", "p95", "others p50", "steps", "computed",
            "cached", "preempted", "pages loaded",
        ),
        electives.by_urgency, TINY, (0, 2),
    ),
    "embedding": Measurement(
        (
            "budget", "vectors", "gap, steps", "gap, tokens p50", "gap, tokens max",
            "vector, steps p50", "steps",
        ),
        electives.by_budget, TINY, (16, 32, 64, 256),
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones measure`."""
    parser.add_argument("milestone", help="a milestone: m3")
    parser.add_argument("--model", help="default: that of the handout")
    parser.add_argument(
        "--static", action="store_true", help="m2: count static and continuous batches"
    )
    parser.add_argument(
        "--chunks", action="store_true", help="m3: the tokens of a step against TTFT and ITL"
    )
    parser.add_argument(
        "--shared", action="store_true", help="m4: count the KV that a step reads of a prefix"
    )


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Measure, and show the table."""
    console = Console()
    milestone = find_engine(args.milestone, root)
    chosen = MEASUREMENTS[short(milestone)]
    for option, (own, more) in MORE.items():
        if getattr(args, option):
            if short(milestone) != own:
                raise ValueError(f"--{option} measures {own}, and no other engine")
            chosen = more
    model = args.model or chosen.model
    table = Table(*chosen.columns, box=None, padding=(0, 2), header_style="dim")
    with console.status("measuring …"):
        for row in chosen.rows(milestone, model, chosen.sizes):
            table.add_row(*row)
    console.print(f"{milestone}, {model}", style="bold", highlight=False)
    console.print(table)
    return 0
