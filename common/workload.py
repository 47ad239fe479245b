"""A set of requests run on one engine, in this process or in one of its own.

Engines that are compared each get a process: none inherits another's memory, threads or caches.
`python -m common.workload m1_single` reads a workload as JSON from standard input and writes the
result as JSON to standard output.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from .config import EngineConfig
from .offline import OfflineEngine
from .sampling_params import SamplingParams


@dataclass
class Workload:
    """Prompts as token ids, all there at the start; greedy, `max_tokens[i]` tokens for each."""

    prompts: list[list[int]]
    max_tokens: list[int]
    ignore_eos: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # of EngineConfig

    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(max_tokens=n, temperature=0, ignore_eos=self.ignore_eos)
            for n in self.max_tokens
        ]

    def warm_up(self) -> Workload:
        """Prompts of the same lengths, two tokens each. They are reversed: what a prefix cache
        keeps of them is of no use to those that are measured."""
        prompts = [prompt[::-1] for prompt in self.prompts]
        return Workload(prompts, [2] * len(prompts), self.ignore_eos, self.config)


@dataclass
class WorkloadResult:
    """What a run gave: tokens, seconds from the first request to the last token, counters."""

    token_ids: list[list[int]]
    seconds: float
    first_token_seconds: list[float]
    stats: dict[str, int] = field(default_factory=dict)
    kv_reserved: int = 0  # tokens of KV memory held, added up over the steps
    kv_used: int = 0  # and how many of them were written
    most_running: int = 0  # requests in flight at once
    inter_token_seconds: list[float] = field(default_factory=list)  # between tokens, of them all

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def kv_waste(self) -> float | None:
        """The share of the KV memory held that nothing was written to; None where none is told."""
        return 1 - self.kv_used / self.kv_reserved if self.kv_reserved else None


def percentile(values: list[float], percent: float) -> float:
    """The value that so many percent of them do not exceed; 0 for none."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)] if ranked else 0.0


def run(engine: OfflineEngine, workload: Workload) -> WorkloadResult:
    """Serve the workload; the engine must be idle."""
    before = asdict(engine.stats())
    started = time.perf_counter()
    ids = [
        engine.add_request(prompt, params)
        for prompt, params in zip(workload.prompts, workload.params(), strict=True)
    ]
    finals = {}
    token_times: dict[str, list[float]] = {request_id: [] for request_id in ids}
    kv_reserved = kv_used = most_running = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_times[output.request_id].append(time.perf_counter())
            if output.finished:
                finals[output.request_id] = output
        stats = engine.stats()
        kv_reserved += stats.kv_tokens_reserved
        kv_used += stats.kv_tokens_used
        most_running = max(most_running, stats.num_running)
    seconds = time.perf_counter() - started
    outputs = [finals[request_id] for request_id in ids]
    return WorkloadResult(
        token_ids=[output.outputs[0].token_ids for output in outputs],
        seconds=seconds,
        first_token_seconds=[output.metrics.time_to_first_token or 0.0 for output in outputs],
        stats={name: value - before[name] for name, value in asdict(engine.stats()).items()},
        kv_reserved=kv_reserved,
        kv_used=kv_used,
        most_running=most_running,
        inter_token_seconds=[b - a for times in token_times.values() for a, b in pairwise(times)],
    )


def run_rung(milestone: str, workload: Workload) -> WorkloadResult | None:
    """Run a milestone's engine in a process of its own. None where there is no such milestone."""
    if importlib.util.find_spec(milestone) is None:
        return None
    return run_module(workload, "common.workload", milestone)


def run_module(workload: Workload, *command: str) -> WorkloadResult:
    """Run `python -m command...`, which must speak this module's protocol.

    Raises `RuntimeError` with its last words if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command],
        input=json.dumps(asdict(workload)),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return WorkloadResult(**json.loads(done.stdout))


def serve(milestone: str) -> None:
    """The other side of `run_rung`: read a workload, run it, write the result."""
    workload = Workload(**json.load(sys.stdin))
    engine = importlib.import_module(milestone).LLMEngine(EngineConfig(**workload.config))
    # The first forwards of a process, and the first touch of its memory, are slow everywhere.
    run(engine, workload.warm_up())
    sys.stdout.write(json.dumps(asdict(run(engine, workload))))


if __name__ == "__main__":
    serve(sys.argv[1])
