"""Measure what a milestone is about: one table, with the place where it bends.

    m1  the time of a step against the context, with the cache and without
    m2  the time of a step against the rows of a batch
    m3  the requests that fit in one pool against the page size (counters)
    m4  the share of prompt tokens that are reused against the size of the pool (counters)
    m5  the time of a step against the time of the forward, serial and overlapped

Read "Measure it" in the handout first, and write down what you expect. Counters are the same on
every machine. Of times, compare only ratios of one run.

Exit status: 0 the table was shown; 2 there is no such milestone.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from common import EMBEDDED_MODEL
from common.displays.workload import Workload

from ...chain import find_engine, short
from ..delta import ROOT
from .measure_electives import ELECTIVES
from .measuring import TINY, Measurement, Row, measured, milliseconds, prompts_of

EXAMPLE = "python -m milestones measure m3"
SLOTS = 1024  # tokens in m3's pool
CHAT_PAGE = 8  # tokens in a page of m4's pool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones measure`."""
    parser.add_argument("milestone", help="a milestone: m3")
    parser.add_argument("--model", help="default: that of the handout")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Measure, and show the table."""
    console = Console()
    try:
        milestone = find_engine(args.milestone, root)
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 2
    chosen = MEASUREMENTS[short(milestone)]
    model = args.model or chosen.model
    table = Table(*chosen.columns, box=None, padding=(0, 2), header_style="dim")
    with console.status("measuring …"):
        for row in chosen.rows(milestone, model, chosen.sizes):
            table.add_row(*row)
    console.print(f"{milestone}, {model}", style="bold", highlight=False)
    console.print(table)
    return 0


def by_context(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m1: four steps after a prompt of each length."""
    for size in sizes:
        row = [f"{size:.0f}"]
        config = {"model": model, "max_model_len": int(size) + 8}
        for use_cache in (True, False):
            workload = Workload(prompts_of([int(size)]), [5], True, config)
            result = measured(milestone, workload, use_cache=use_cache)
            fed = result.stats["prefill_tokens"] + result.stats["decode_tokens"] - int(size)
            row += [f"{fed / 4:.1f}", milliseconds(result.inter_token_seconds)]
        yield tuple(row)


def by_rows(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m2: steps in which so many requests decode together."""
    for size in map(int, sizes):
        config = {"model": model, "max_num_seqs": size, "max_model_len": 64}
        workload = Workload(prompts_of([16] * size), [9] * size, True, config)
        result = measured(milestone, workload)
        step = median(result.inter_token_seconds)
        yield f"{size}", f"{1e3 * step:.2f}", f"{1e3 * step / size:.2f}"


def by_page_size(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m3: the same requests, in pools of as many tokens, divided into pages of another size."""
    drawn = random.Random(7)
    lengths = [drawn.randint(8, 40) for _ in range(48)]
    wanted = [drawn.randint(4, 24) for _ in lengths]
    for size in map(int, sizes):
        config = {
            "model": model, "max_num_seqs": 48, "max_model_len": 64, "page_size": size,
            "num_pages": SLOTS // size, "attention_backend": "torch",
        }  # fmt: skip
        result = measured(milestone, Workload(prompts_of(lengths), wanted, True, config))
        waste = result.kv_waste
        assert waste is not None, "the requests hold memory"
        steps, retractions = result.stats["num_steps"], result.stats["num_retractions"]
        yield f"{size}", f"{result.most_running}", f"{waste:.0%}", f"{steps}", f"{retractions}"


def by_pool(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m4: three turns of eight users. All prompts begin with the same tokens."""
    [stem] = prompts_of([32], seed=1)
    prompts = [stem + prompt for prompt in prompts_of([16] * 8, seed=2)]
    turns = [prompts_of([12, 12], seed=10 + user) for user in range(8)]
    for size in map(int, sizes):
        config = {
            "model": model, "max_num_seqs": 2, "max_model_len": 128, "page_size": CHAT_PAGE,
            "num_pages": size, "attention_backend": "torch",
        }  # fmt: skip
        result = measured(milestone, Workload(prompts, [8] * 8, True, config, follow_ups=turns))
        stats = result.stats
        yield (
            f"{size}", f"{size * CHAT_PAGE}", f"{result.hit_rate:.0%}", f"{stats['prefill_tokens']}"
        )  # fmt: skip


def by_forward(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m5: steps with emulated forwards of so many milliseconds, serial and overlapped."""
    for size in sizes:
        result = {}
        for overlap in (False, True):
            config = {
                "model": model, "max_num_seqs": 32, "max_model_len": 64,
                "emulated_forward_ms": size, "enable_overlap": overlap,
            }  # fmt: skip
            workload = Workload(prompts_of([8] * 32), [24] * 32, True, config)
            result[overlap] = measured(milestone, workload)
        host, forward = median(result[False].gap_seconds), median(result[False].forward_seconds)
        yield (
            f"{size:g}", f"{1e3 * host:.2f}", f"{1e3 * forward:.2f}",
            f"{1e3 * (host + forward):.2f}", milliseconds(result[False].inter_token_seconds),
            f"{1e3 * max(host, forward):.2f}", milliseconds(result[True].inter_token_seconds),
        )  # fmt: skip


MEASUREMENTS = {
    "m1": Measurement(
        ("context", "tokens fed, cache", "ms, cache", "tokens fed, no cache", "ms, no cache"),
        by_context, EMBEDDED_MODEL, (16, 64, 256, 480),
    ),
    "m2": Measurement(
        ("rows", "ms per step", "ms per token"), by_rows, EMBEDDED_MODEL, (1, 2, 4, 8, 16, 32, 64),
    ),
    "m3": Measurement(
        ("page size", "most running", "held, not written", "steps", "retractions"),
        by_page_size, TINY, (1, 2, 4, 8, 16, 32, 64),
    ),
    "m4": Measurement(
        ("pages", "tokens", "reused", "prompt tokens computed"),
        by_pool, TINY, (24, 32, 48, 64, 80, 96, 128, 192),
    ),
    "m5": Measurement(
        ("emulated ms", "h", "f", "h + f", "serial", "max(h, f)", "overlapped"),
        by_forward, TINY, (0, 1, 2, 4, 8, 16),
    ),
    **ELECTIVES,
}  # fmt: skip
