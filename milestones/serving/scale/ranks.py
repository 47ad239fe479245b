"""`scale ranks`: the steps of one process, and of ranks that divide the model, in paired runs.

A rank stands for a device, and a core is the device of a rank: each process computes with one
thread. (Two threads of one process would wait for each other in every product, as the ranks do in
every sum. On a busy machine they do so for longer than they compute.) The sides take turns in every
round, so that both meet the same other work of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from common import EngineConfig, SamplingParams
from common.displays.demo import machine

from ...chain import load
from .page import on_screen, rank_rows

ROOT = Path(__file__).resolve().parents[3]
MODEL = "random-qwen3-0.6b"
DECODE_STEPS = 8


@dataclass(frozen=True)
class Work:
    """What one run computes: prompts of a length, then decode steps for all of them together."""

    name: str
    requests: int
    prompt_tokens: int


WORKS = (Work("one request", 1, 8), Work("8 requests", 8, 8), Work("a prompt of 128", 1, 128))


@dataclass(frozen=True)
class Times:
    """Seconds of the first step with tokens, of each later step, and of the sums within these."""

    first: float
    step: float
    together: float


class Side:
    """A process with an engine, which runs one `Work` for each line that it reads."""

    def __init__(self, milestone: str, model: str, num_ranks: int) -> None:
        module = ["-m", "milestones.serving.scale.ranks"]
        command = [sys.executable, *module, milestone, model, str(num_ranks)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.memory: dict[str, int] = self._answer()

    def run(self, work: Work) -> Times:
        """Return the times of one run."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(work)) + "\n")
        self.process.stdin.flush()
        return Times(**self._answer())

    def close(self) -> None:
        """End the process, and wait for it."""
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure each work on one process and on `--ranks`, and print the ratios."""
    model = MODEL if args.model == "tiny-llama" else args.model  # too small: see SCALING.md
    sides = [Side(args.milestone, model, num_ranks) for num_ranks in (1, args.ranks)]
    found = []
    for work in WORKS:
        for side in sides:
            side.run(work)  # warms up
        runs = [[side.run(work) for side in sides] for _ in range(args.rounds)]
        found.append({"work": work.name, **_ratios(runs)})
        console.print(found[-1])
    for side in sides:
        side.close()
    document = {
        "machine": machine(), "model": model, "ranks": args.ranks, "rounds": args.rounds,
        "memory": [side.memory for side in sides], "rows": found,
    }  # fmt: skip
    title = f"{args.ranks} ranks / one process, on {document['machine']}"
    console.print(on_screen(title, rank_rows(found)))
    return document


def _ratios(runs: Sequence[Sequence[Times]]) -> dict[str, float]:
    """Return the medians of the ratios of paired runs, and of the seconds of one process."""
    return {
        "first": round(median(ours.first / alone.first for alone, ours in runs), 3),
        "step": round(median(ours.step / alone.step for alone, ours in runs), 3),
        "own": round(median((two.step - two.together) / one.step for one, two in runs), 3),
        "first_seconds": round(median(alone.first for alone, _ in runs), 4),
        "step_seconds": round(median(alone.step for alone, _ in runs), 4),
    }


def serve(milestone: str, model: str, num_ranks: int) -> None:
    """Be one side: print the memory of a rank, then the times of each work that is read."""
    config = EngineConfig(
        model=model, device="cpu", tensor_parallel_size=num_ranks, quantization="none",
        num_pages=256, max_model_len=1024, cuda_graph=False, seed=0,
    )  # fmt: skip
    with load(milestone).LLMEngine(config) as engine:
        pool = engine.core.runner.kv_pool
        group = engine.loaded.ranks
        whole = {p.data_ptr(): p.nbytes for p in engine.loaded.model.parameters()}
        memory = {
            "weights": group.weight_bytes[0] if group else sum(whole.values()),
            "kv_per_token": sum(x[:, 0, 0].nbytes for x in (*pool.keys, *pool.values)),
        }
        _say(memory)
        for number, line in enumerate(sys.stdin):
            _say(asdict(_run(engine, Work(**json.loads(line)), number)))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _run(engine: Any, work: Work, number: int) -> Times:
    """Run one work. number: makes its prompts differ from those of other runs."""
    params = SamplingParams(temperature=0, max_tokens=DECODE_STEPS + 1, ignore_eos=True)
    for i in range(work.requests):
        prompt = [(number * 7919 + i * 31 + p * p) % 251 for p in range(work.prompt_tokens)]
        engine.add_request(prompt, params)
    started = time.perf_counter()
    while not engine.step():
        pass
    first, steps, before = time.perf_counter(), 0, _seconds_together(engine)
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    together = _seconds_together(engine) - before
    return Times(first - started, (time.perf_counter() - first) / steps, together / steps)


def _seconds_together(engine: Any) -> float:
    """Return the seconds that rank 0 has spent in collective operations."""
    group = engine.loaded.ranks
    return 0.0 if group is None else float(group.ranks.seconds)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
