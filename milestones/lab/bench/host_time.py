"""Measure the host's share of a step, outside the forward, for m3_paged and higher milestones.

The forward lane is busy from the beginning of a forward until its tokens are sampled. *The gap* is
the time between two such spans. It is the critical path of the host: a GPU would wait that long.

*Thread CPU time* counts only the time in which the host's thread ran, with all outputs of the step
read. Other programs on the machine disturb it less than they disturb the time on a clock.

The measured steps are decode steps of greedy requests, with text. No forward is computed: it gives
each request a letter. On one CPU, the host and a real forward would compete for the same cores,
caches and Python lock. In half of the measurements, the forward returns at once. In the other half
it sleeps first, in all milestones, as if another processor computed it. A host that has waited is
slower: its core and its caches are cold.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console

from common import EngineConfig, RequestOutput, SamplingParams
from common.displays.demo import machine
from common.displays.shapes import summary_table

from ... import recording
from ...chain import at_least

MILESTONES = ("m3_paged", "m4_radix", "m5_overlap")
SIZES = (1, 16, 64, 256)
PROMPT_TOKENS = 20
STEPS = 100
WARM_UP_STEPS = 10
PAUSES_MS = (0, 10)  # the second one is longer than the host needs
FIRST_LETTER = 64  # the token of "a" in the tiny models


@dataclass
class HostTime:
    """Microseconds per step. Medians, except for `cpu`."""

    milestone: str
    num_running: int
    pause_ms: int  # the time that a forward sleeps
    host: float  # time of the host per step, without waiting for the forward
    gap: float  # from the end of a forward to the beginning of the next
    # Thread CPU time of the host, outside the forward: the first decile, because a disturbed step
    # only takes longer.
    cpu: float


def measure(milestone: str, num_running: int, pause_ms: int) -> HostTime:
    """Measure decode steps with a constant number of running requests."""
    overlaps = at_least(milestone, "m5_overlap")
    config = EngineConfig(
        model="tiny-llama", device="cpu", max_num_seqs=num_running, max_num_batched_tokens=8192,
        num_pages=num_running * 10, seed=0,
    )  # fmt: skip
    with importlib.import_module(milestone).LLMEngine(config) as engine, ExitStack() as undo:
        params = SamplingParams(
            max_tokens=STEPS + 2 * WARM_UP_STEPS, temperature=0, ignore_eos=True
        )
        for i in range(num_running):
            engine.add_request([(7 * i + j) % 250 for j in range(PROMPT_TOKENS)], params)
        _give_letters(engine.core.runner, num_running, pause_ms / 1000)
        forwards = (
            engine.core.runner.stream.spans if overlaps else _forwards(milestone, engine, undo)
        )
        waits = _spans(engine.core, "wait") if overlaps else forwards
        steps = _spans(engine, "step")
        in_forwards = [] if overlaps else _forwards(milestone, engine, undo, time.thread_time)
        cpu: list[float] = []
        while engine.has_unfinished_requests():
            began = time.thread_time()
            _read(engine.step())
            cpu.append(time.thread_time() - began)
    spans = list(forwards)[WARM_UP_STEPS:][:STEPS]
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    chosen = slice(WARM_UP_STEPS, WARM_UP_STEPS + STEPS)
    host = [
        (step[1] - step[0]) - (wait[1] - wait[0])
        for step, wait in zip(steps[chosen], waits[chosen], strict=True)
    ]
    if not overlaps:
        cpu = [c - (f[1] - f[0]) for c, f in zip(cpu, in_forwards, strict=True)]
    least = quantiles(cpu[chosen], n=10)[0]
    micros = (1e6 * median(host), 1e6 * median(gaps), 1e6 * least)
    return HostTime(milestone, num_running, pause_ms, *micros)


def _read(outputs: list[RequestOutput]) -> None:
    """Read the outputs of a step, as a server would."""
    for output in outputs:
        completion = output.outputs[0]
        assert completion.text is not None and completion.token_ids and output.request_id


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


def _forwards(
    milestone: str, engine: Any, undo: ExitStack, clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, float]]:
    """Record each span from the start of the forward to the end of sampling, in a serial engine."""
    runner = importlib.import_module(f"{milestone}.model_runner")
    began: list[float] = []
    forward, sample, spans = engine.core.runner.forward, runner.sample, []

    def timed_forward(inputs: Any) -> torch.Tensor:
        began.append(clock())
        return forward(inputs)

    def timed_sample(*args: Any) -> Any:
        output = sample(*args)
        spans.append((began[-1], clock()))
        return output

    engine.core.runner.forward = timed_forward
    undo.callback(setattr, runner, "sample", sample)
    vars(runner)["sample"] = timed_sample
    return spans


def _give_letters(runner: Any, num_running: int, pause: float) -> None:
    """Replace the forward: it sleeps, and returns logits with which each request gets a letter."""
    logits = torch.zeros(num_running, runner.model.config.vocab_size)
    rows = torch.arange(num_running)
    logits[rows, FIRST_LETTER + rows % 26] = 1.0

    def forward(inputs: Any) -> torch.Tensor:
        if pause:
            time.sleep(pause)
        return logits[: len(inputs.logits_indices)]

    runner.forward = forward
    if hasattr(runner, "graphs"):
        runner.graphs.forward = forward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones host-time`."""
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def main(args: argparse.Namespace) -> int:
    """Measure and report."""
    rows: list[HostTime] = []
    for pause_ms in PAUSES_MS:
        forwards = f"forwards that sleep {pause_ms} ms" if pause_ms else "forwards without a pause"
        table = summary_table(
            f"microseconds per step, outside the forward, {forwards} · {machine()}", "running",
            *(f"{name[:2]} {what}" for name in MILESTONES for what in ("host", "gap", "cpu")),
        )  # fmt: skip
        for size in SIZES:
            measured = [measure(name, size, pause_ms) for name in MILESTONES]
            rows += measured
            micros = (f"{x:.0f}" for m in measured for x in (m.host, m.gap, m.cpu))
            table.add_row(str(size), *micros)
        Console().print(table)
    if args.json:
        figures = {"machine": machine(), "microseconds": [asdict(row) for row in rows]}
        recording.write(args.json, figures)
    return 0
