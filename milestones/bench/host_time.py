"""Measure the host's share of a step, outside the forward, for m3_paged and higher milestones.

The forward lane is busy from the beginning of a forward until its tokens are sampled. *The gap* is
the time between two such spans. It is the critical path of the host: a GPU would wait that long.

The measured steps are decode steps of a tiny model. The forwards of m5_overlap are emulated by
sleeping, as if another processor computed them. On one CPU, the host and a real forward would
compete for the same cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from common import EngineConfig, SamplingParams
from common.displays.dashboard import summary_table
from common.displays.demo import machine

from ..chain import at_least

MILESTONES = ("m3_paged", "m4_radix", "m5_overlap")
SIZES = (1, 16, 64, 256)
PROMPT_TOKENS = 20
STEPS = 100
WARM_UP_STEPS = 10
EMULATED_FORWARD_MS = 40.0


@dataclass
class HostTime:
    """Medians over the steps, in microseconds."""

    milestone: str
    num_running: int
    host: float  # time of the host per step, without waiting for the forward
    gap: float  # from the end of a forward to the beginning of the next


def measure(milestone: str, num_running: int) -> HostTime:
    """Measure decode steps with a constant number of running requests."""
    overlaps = at_least(milestone, "m5_overlap")
    config = EngineConfig(
        model="tiny-llama", device="cpu", max_num_seqs=num_running, max_num_batched_tokens=8192,
        num_pages=num_running * 10, seed=0,
        emulated_forward_ms=EMULATED_FORWARD_MS if overlaps else 0.0,
    )  # fmt: skip
    with importlib.import_module(milestone).LLMEngine(config) as engine, ExitStack() as undo:
        params = SamplingParams(
            max_tokens=STEPS + 2 * WARM_UP_STEPS, temperature=0, ignore_eos=True
        )
        for i in range(num_running):
            engine.add_request([(7 * i + j) % 250 for j in range(PROMPT_TOKENS)], params)
        forwards = engine.runner.stream.spans if overlaps else _forwards(milestone, engine, undo)
        waits = _spans(engine, "wait") if overlaps else forwards
        steps = _spans(engine, "step")
        while engine.has_unfinished_requests():
            engine.step()
    spans = list(forwards)[WARM_UP_STEPS:][:STEPS]
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    chosen = slice(WARM_UP_STEPS, WARM_UP_STEPS + STEPS)
    host = [
        (step[1] - step[0]) - (wait[1] - wait[0])
        for step, wait in zip(steps[chosen], waits[chosen], strict=True)
    ]
    return HostTime(milestone, num_running, 1e6 * median(host), 1e6 * median(gaps))


def _spans(owner: Any, name: str) -> list[tuple[float, float]]:
    """Record when each call of this method of `owner` begins and ends, from now on."""
    method, spans = getattr(owner, name), []

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spans.append((started, time.perf_counter()))

    setattr(owner, name, timed)
    return spans


def _forwards(milestone: str, engine: Any, undo: ExitStack) -> list[tuple[float, float]]:
    """Record each span from the start of the forward to the end of sampling, in a serial engine."""
    runner = importlib.import_module(f"{milestone}.model_runner")
    began: list[float] = []
    hook = engine.runner.model.register_forward_pre_hook(
        lambda *_: began.append(time.perf_counter())
    )
    undo.callback(hook.remove)
    sample, spans = runner.sample, []

    def timed(*args: Any) -> Any:
        output = sample(*args)
        spans.append((began[-1], time.perf_counter()))
        return output

    undo.callback(setattr, runner, "sample", sample)
    vars(runner)["sample"] = timed
    return spans


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones host-time`."""
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def main(args: argparse.Namespace) -> int:
    """Measure and report."""
    table = summary_table(
        f"microseconds per step, outside the forward · {machine()}",
        "running", *(f"{name[:2]} {what}" for name in MILESTONES for what in ("host", "gap")),
    )  # fmt: skip
    rows: list[HostTime] = []
    for size in SIZES:
        measured = [measure(name, size) for name in MILESTONES]
        rows += measured
        table.add_row(str(size), *(f"{x:.0f}" for m in measured for x in (m.host, m.gap)))
    Console().print(table)
    if args.json:
        figures = {"machine": machine(), "microseconds": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0
