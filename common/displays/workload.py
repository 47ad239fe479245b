"""A fixed set of requests, and what an engine needs to serve them: time, steps and memory."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from ..llm_engine import LLMEngine
from ..outputs import RequestOutput, StepCounters
from ..sampling.params import SamplingParams
from ..tracing.forwards import Forwards, HookedForwards, StreamForwards


@dataclass
class Workload:
    """Prompts as token ids. Prompt i gets up to `max_tokens[i]` tokens.

    temperature: of all engines, without top-k, top-p and the like. 0: greedy.
    arrivals: the seconds from the start at which each prompt arrives. Empty: all arrive at once.
    follow_ups: the later turns of each user. When a request ends, the prompt of the next one is the
        old prompt, the answer and these tokens.
    pauses: the seconds that each user waits before each later turn. Empty: no user waits.
    costs: of `StepCosts`, with which the run is in virtual time. None: the machine's time counts.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    ignore_eos: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # of EngineConfig
    arrivals: list[float] = field(default_factory=list)
    follow_ups: list[list[list[int]]] = field(default_factory=list)
    pauses: list[list[float]] = field(default_factory=list)
    temperature: float = 0.0
    costs: dict[str, float] | None = None

    def warm_up(self) -> Workload:
        """Return a workload with prompts of the same lengths and two output tokens each.

        The prompts are reversed, so that cached prefixes of them do not help the measured run.
        """
        prompts = [prompt[::-1] for prompt in self.prompts]
        most = [2] * len(prompts)
        return Workload(prompts, most, self.ignore_eos, self.config, temperature=self.temperature)

    @property
    def sampling(self) -> str:
        """Return how every engine samples, in words."""
        return f"temperature {self.temperature:g}" if self.temperature > 0 else "greedy"


@dataclass
class WorkloadResult:
    """The result of a run: tokens, seconds from the first request to the last token, counters.

    Requests are in the order of the prompts, each followed by its later turns. The seconds to a
    first token count from the arrival of the request. All seconds but `machine_seconds` are those
    of the engine's clock, which may be virtual.
    """

    token_ids: list[list[int]]
    seconds: float
    first_token_seconds: list[float]
    stats: dict[str, int] = field(default_factory=dict)  # `StepCounters` of the run
    kv_reserved: int = 0  # tokens of KV memory held, summed over the steps
    kv_used: int = 0  # tokens of KV memory written, summed over the steps
    most_running: int = 0  # most requests that ran at the same time
    inter_token_seconds: list[float] = field(
        default_factory=list
    )  # between tokens of one request; of all requests
    forward_seconds: list[float] = field(default_factory=list)  # of each forward
    gap_seconds: list[float] = field(default_factory=list)  # between two forwards
    machine_seconds: float = field(default=0.0, compare=False)  # of the whole run

    @property
    def tokens_per_second(self) -> float:
        """Return the output tokens per second. The time includes prefill."""
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def kv_waste(self) -> float | None:
        """Return the share of the held KV memory that was not written. None if it is unknown."""
        return 1 - self.kv_used / self.kv_reserved if self.kv_reserved else None

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompt tokens that came from the prefix cache."""
        reused = self.stats["cached_prompt_tokens"]
        return reused / max(1, reused + self.stats["prefill_tokens"])


def percentile(values: list[float], percent: float) -> float:
    """Return the value that `percent` of the values do not exceed, or 0 if there are no values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)] if ranked else 0.0


def run(engine: LLMEngine, workload: Workload) -> WorkloadResult:
    """Serve the workload and return the result. The engine must be idle."""
    before = counters(engine)
    driver = Driver(workload)
    kv_reserved = kv_used = most_running = 0
    with ExitStack() as undo:
        forwards = watch_forwards(engine, undo)
        started, machine_started = engine.now(), time.perf_counter()
        while not driver.done:
            driver.add_due(engine, engine.now() - started)
            for output in engine.step():
                driver.take(output, engine.now() - started)
            stats = engine.stats()
            kv_reserved += stats.kv_tokens_reserved
            kv_used += stats.kv_tokens_used
            most_running = max(most_running, stats.num_running)
        seconds, machine_seconds = engine.now() - started, time.perf_counter() - machine_started
        spans = forwards.take()
    served = [request for turns in driver.turns for request in turns]
    return WorkloadResult(
        token_ids=[request.token_ids for request in served],
        seconds=seconds,
        first_token_seconds=[request.token_seconds[0] - request.due for request in served],
        stats={name: value - before[name] for name, value in counters(engine).items()},
        kv_reserved=kv_reserved,
        kv_used=kv_used,
        most_running=most_running,
        inter_token_seconds=[b - a for r in served for a, b in pairwise(r.token_seconds)],
        forward_seconds=[end - begin for begin, end in spans],
        gap_seconds=[begin - end for (_, end), (begin, _) in pairwise(spans)],
        machine_seconds=machine_seconds,
    )


def counters(engine: LLMEngine) -> dict[str, int]:
    """Return the counters of `EngineStats` that only grow, so that a run can be subtracted."""
    stats = engine.stats()
    return {counter.name: getattr(stats, counter.name) for counter in fields(StepCounters)}


@dataclass
class Served:
    """A request of a workload, and the times of its tokens."""

    prompt: list[int]
    max_tokens: int
    due: float  # seconds from the start
    token_ids: list[int] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    num_cached: int = 0  # tokens of the prompt that came from the prefix cache
    finished: bool = False


class Driver:
    """The users of a workload. Each sends a request when it is due, and reads the answer."""

    def __init__(self, workload: Workload) -> None:
        self.ignore_eos, self.temperature = workload.ignore_eos, workload.temperature
        count = len(workload.prompts)
        due = workload.arrivals or [0.0] * count
        first = zip(workload.prompts, workload.max_tokens, due, strict=True)
        self.turns = [[Served(*request)] for request in first]
        self._to_say = [list(user) for user in workload.follow_ups or [[]] * count]
        self._pauses = [list(user) for user in workload.pauses or [[]] * count]
        self._coming = list(range(count))  # users with a request that is not sent yet
        self._users: dict[str, int] = {}  # by the id of the request that a user waits for

    @property
    def done(self) -> bool:
        return not self._coming and not self._users

    def add_due(self, engine: LLMEngine, now: float) -> None:
        """Send the requests that are due. If the engine is idle, wait until a request is due."""
        if not self._users:
            due = min(self.turns[user][-1].due for user in self._coming)
            if due > now:
                engine.clock.sleep(due - now)
                now = due
        for user in [user for user in self._coming if self.turns[user][-1].due <= now]:
            request = self.turns[user][-1]
            params = SamplingParams(
                request.max_tokens, self.temperature, ignore_eos=self.ignore_eos
            )
            more = self.options(user)
            self._users[engine.add_request(request.prompt, params, **more)] = user
            self._coming.remove(user)

    def options(self, user: int) -> dict[str, Any]:
        """Return more arguments of `add_request` for the next turn of a user."""
        return {}

    def take(self, output: RequestOutput, now: float) -> None:
        """Note the tokens of an output. After the last one, the user may start the next turn.

        Raises `RuntimeError` if the request failed: a measurement of it would mean nothing.
        """
        if error := output.outputs[0].error:
            raise RuntimeError(f"{output.request_id}: {error}")
        user = self._users[output.request_id]
        request, tokens = self.turns[user][-1], output.outputs[0].token_ids
        request.token_seconds += [now] * (len(tokens) - len(request.token_ids))
        request.token_ids = tokens
        if output.finished:
            del self._users[output.request_id]
            request.num_cached = output.metrics.num_cached_tokens
            if self._to_say[user]:
                prompt = request.prompt + tokens + self._to_say[user].pop(0)
                due = now + (self._pauses[user].pop(0) if self._pauses[user] else 0.0)
                self.turns[user].append(Served(prompt, request.max_tokens, due))
                self._coming.append(user)


def watch_forwards(engine: Any, undo: ExitStack) -> Forwards:
    """Return an observer of the times at which the engine's forwards run."""
    spans = getattr(getattr(engine.core.runner, "stream", None), "spans", None)
    if spans is not None:
        return StreamForwards(spans)
    return HookedForwards(engine.core.runner.model, lambda: True, undo, engine.clock)
