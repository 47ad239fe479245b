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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from .config import EngineConfig
from .offline import OfflineEngine
from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .trace_forwards import Forwards, HookedForwards, StreamForwards


@dataclass
class Workload:
    """Prompts as token ids; greedy, `max_tokens[i]` tokens for each.

    arrivals: seconds from the start at which each one comes; none: all are there at the start.
    follow_ups: what each user says next. When a request is done, the next one is its prompt, its
        answer and these tokens.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    ignore_eos: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # of EngineConfig
    arrivals: list[float] = field(default_factory=list)
    follow_ups: list[list[list[int]]] = field(default_factory=list)

    def warm_up(self) -> Workload:
        """Prompts of the same lengths, two tokens each. They are reversed: what a prefix cache
        keeps of them is of no use to those that are measured."""
        prompts = [prompt[::-1] for prompt in self.prompts]
        return Workload(prompts, [2] * len(prompts), self.ignore_eos, self.config)


@dataclass
class WorkloadResult:
    """What a run gave: tokens, seconds from the first request to the last token, counters.

    Requests are in the order of the prompts, each with its follow-ups behind it. Seconds to the
    first token count from when a request was due.
    """

    token_ids: list[list[int]]
    seconds: float
    first_token_seconds: list[float]
    stats: dict[str, int] = field(default_factory=dict)
    kv_reserved: int = 0  # tokens of KV memory held, added up over the steps
    kv_used: int = 0  # and how many of them were written
    most_running: int = 0  # requests in flight at once
    inter_token_seconds: list[float] = field(default_factory=list)  # between tokens, of them all
    gap_seconds: list[float] = field(default_factory=list)  # between two forwards

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
    driver = Driver(workload)
    kv_reserved = kv_used = most_running = 0
    with ExitStack() as undo:
        forwards = watch_forwards(engine, undo)
        started = time.perf_counter()
        while not driver.done:
            driver.add_due(engine, time.perf_counter() - started)
            for output in engine.step():
                driver.take(output, time.perf_counter() - started)
            stats = engine.stats()
            kv_reserved += stats.kv_tokens_reserved
            kv_used += stats.kv_tokens_used
            most_running = max(most_running, stats.num_running)
        seconds = time.perf_counter() - started
        spans = forwards.take()
    served = [request for turns in driver.turns for request in turns]
    return WorkloadResult(
        token_ids=[request.token_ids for request in served],
        seconds=seconds,
        first_token_seconds=[request.token_seconds[0] - request.due for request in served],
        stats={name: value - before[name] for name, value in asdict(engine.stats()).items()},
        kv_reserved=kv_reserved,
        kv_used=kv_used,
        most_running=most_running,
        inter_token_seconds=[b - a for r in served for a, b in pairwise(r.token_seconds)],
        gap_seconds=[begin - end for (_, end), (begin, _) in pairwise(spans)],
    )


@dataclass
class Served:
    """A request of a workload, and when its tokens came."""

    prompt: list[int]
    max_tokens: int
    due: float  # seconds from the start
    token_ids: list[int] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    finished: bool = False


class Driver:
    """The users of a workload: each sends a request when it is due, and reads the answer."""

    def __init__(self, workload: Workload) -> None:
        self.ignore_eos = workload.ignore_eos
        count = len(workload.prompts)
        self.turns = [
            [Served(prompt, max_tokens, due)]
            for prompt, max_tokens, due in zip(
                workload.prompts,
                workload.max_tokens,
                workload.arrivals or [0.0] * count,
                strict=True,
            )
        ]
        self._to_say = [list(user) for user in workload.follow_ups or [[]] * count]
        self._coming = list(range(count))  # users whose request has not been sent
        self._users: dict[str, int] = {}  # by the id of the request that they wait for

    @property
    def done(self) -> bool:
        return not self._coming and not self._users

    def add_due(self, engine: OfflineEngine, now: float) -> None:
        """Send what is due; where the engine is idle, wait until something is."""
        if not self._users:
            time.sleep(max(0.0, min(self.turns[user][-1].due for user in self._coming) - now))
            now = max(now, min(self.turns[user][-1].due for user in self._coming))
        for user in [user for user in self._coming if self.turns[user][-1].due <= now]:
            request = self.turns[user][-1]
            params = SamplingParams(
                max_tokens=request.max_tokens, temperature=0, ignore_eos=self.ignore_eos
            )
            self._users[engine.add_request(request.prompt, params)] = user
            self._coming.remove(user)

    def take(self, output: RequestOutput, now: float) -> None:
        """Note an output's tokens. The last one may be answered with a next turn.

        Raises `RuntimeError` for a request that failed: the measurement would mean nothing.
        """
        if error := output.outputs[0].error:
            raise RuntimeError(f"{output.request_id}: {error}")
        user = self._users[output.request_id]
        request, tokens = self.turns[user][-1], output.outputs[0].token_ids
        request.token_seconds += [now] * (len(tokens) - len(request.token_ids))
        request.token_ids = tokens
        if output.finished:
            del self._users[output.request_id]
            if self._to_say[user]:
                prompt = request.prompt + tokens + self._to_say[user].pop(0)
                self.turns[user].append(Served(prompt, request.max_tokens, now))
                self._coming.append(user)


def watch_forwards(engine: Any, undo: ExitStack) -> Forwards:
    """When the engine's forwards run."""
    spans = getattr(getattr(engine.runner, "stream", None), "spans", None)
    if spans is not None:
        return StreamForwards(spans)
    return HookedForwards(engine.runner.model, lambda: True, undo)


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
    # The first forwards of a process, and the first touch of its memory, are slow everywhere. What
    # is cached of the warm-up would keep the memory that was touched.
    run(engine, workload.warm_up())
    engine.reset_prefix_cache()
    sys.stdout.write(json.dumps(asdict(run(engine, workload))))


if __name__ == "__main__":
    serve(sys.argv[1])
