"""Measure how the time of a decode step grows with requests, context and cached prompts.

running: the number of requests that decode together, after prompts of 16 tokens. The whole step is
measured.

context: the number of tokens before the only request. The whole step is measured.

cached: the number of prompts in the prefix tree, while 16 requests decode. Only the time between
two forwards is measured. The tree costs host time and never changes the forward, so this curve is
measured with a tiny model.
"""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from common import EMBEDDED_MODEL, EngineConfig
from common.displays.demo import machine
from common.displays.shapes import summary_table
from common.displays.workload import Workload, run

from ... import recording
from ...drawing.chart import lines

EXAMPLE = "python -m milestones curves --json curves.json --svg curves.svg"
MILESTONE = "m4_radix"  # the highest milestone without overlap: a step takes its whole cost
RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096)
CACHED = (10, 100, 1000, 10_000)
STEPS = 16
PROMPT_TOKENS = 16
CACHED_TOKENS = 33  # two pages in the tree, and one more token, which is never read from the cache
DECODING = 16

Points = list[tuple[int, float]]  # the size that grows, and the median step in milliseconds


def running(model: str, sizes: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Yield the time of a step for each number of requests that decode."""
    with _engine(model=model, max_num_seqs=max(sizes), max_model_len=64) as engine:
        prompts = _prompts(PROMPT_TOKENS)
        for size in sizes:
            batch = [next(prompts) for _ in range(size)]
            result = run(engine, Workload(batch, [STEPS] * size, True))
            yield size, 1e3 * median(result.inter_token_seconds)


def context(model: str, lengths: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Yield the time of a step of one request for each length of its prompt."""
    longest = max(lengths) + STEPS
    with _engine(model=model, max_num_seqs=1, max_model_len=longest) as engine:
        for length in lengths:
            result = run(engine, Workload([next(_prompts(length))], [STEPS], True))
            yield length, 1e3 * median(result.inter_token_seconds)


def cached(counts: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Yield the gap between forwards for each number of cached prompts. No request matches them."""
    config = {"model": "tiny-llama", "max_num_seqs": DECODING, "max_model_len": 128}
    pages = 2 * max(counts) + 8 * DECODING * (len(counts) + 1)
    with _engine(**config, num_pages=pages) as engine:
        prompts, held = _prompts(CACHED_TOKENS), 0
        for count in counts:
            fill = [next(prompts) for _ in range(count - held)]
            run(engine, Workload(fill, [1] * len(fill), True))
            decoding = [next(prompts)[:15] for _ in range(DECODING)]
            result = run(engine, Workload(decoding, [4 * STEPS] * DECODING, True))
            assert engine.stats().kv_pages_cached >= 2 * count, "a cached prompt is not in the tree"
            held = count
            yield count, 1e3 * median(result.gap_seconds)


def _engine(**config: Any) -> Any:
    return importlib.import_module(MILESTONE).LLMEngine(EngineConfig(**config))


def _prompts(length: int) -> Iterator[list[int]]:
    """Yield random prompts for any vocabulary. Different lengths give different prompts."""
    drawn = random.Random(length)
    while True:
        yield [drawn.randrange(250) for _ in range(length)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones curves`."""
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")


def main(args: argparse.Namespace) -> int:
    """Measure and report."""
    measuring = {
        "running": running(args.model, RUNNING),
        "context": context(args.model, CONTEXTS),
        "cached": cached(CACHED),
    }
    console, curves = Console(), dict[str, Points]()
    for name, points in measuring.items():
        curves[name] = []
        table = summary_table(f"time of a step by {name} · {MILESTONE}", name, "ms")
        for size, milliseconds in points:
            console.print(f"{name}: {size}", style="dim")
            curves[name].append((size, milliseconds))
            table.add_row(f"{size:,}", f"{milliseconds:.2f}")
        console.print(table)
    document = {"machine": machine(), "milestone": MILESTONE, "milliseconds": curves}
    if args.json:
        recording.write(args.json, document)
    if args.svg:
        args.svg.write_text(picture(document), encoding="utf-8")
    return 0


def picture(document: dict[str, Any]) -> str:
    """Draw the figures of a run, as `--json` writes them."""
    curves = {name: {"step": points} for name, points in document["milliseconds"].items()}
    return lines(curves, f"{document['machine']}: ms per step")
