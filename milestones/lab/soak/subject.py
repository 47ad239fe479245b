"""The tested engine: its configuration by a plan, what it must admit, and what it must refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, takewhile
from typing import Any

from common import EngineConfig, EngineDeadError, LoadedModel, Request, SamplingParams
from common.tracing.forced_retractions import force_retractions

from ...chain import load
from ..instruments.audit import audited_engine_class
from .plan import Arrival, Plan, PlannedRequest
from .results import SoakError

WHOLE_PROMPTS = "m2_continuous"  # computes a prompt in one step: its budget must hold most prompts
LEAST_BUDGET = 24
RIGHT = (None, 0.0, 0.5, 0.9, 1.0)  # share of guesses that are right; None: prompt lookup
# Each call gets the engine and the id of a request in flight, and must raise `ValueError`.
BAD_CALLS: tuple[Callable[[Any, str], object], ...] = (
    lambda engine, _: engine.add_request(""),
    lambda engine, _: engine.add_request([]),
    lambda engine, _: engine.add_request([1, -1]),
    lambda engine, _: engine.add_request([1, 10**9]),
    lambda engine, _: engine.add_request([1, 2.5]),
    lambda engine, _: engine.add_request(5),
    lambda engine, _: engine.add_request([1] * engine.config.max_model_len),
    lambda engine, _: engine.add_request([1], {}),
    lambda engine, _: engine.add_request([1], None, 7),
    lambda engine, in_flight: engine.add_request([1], None, in_flight),
    lambda engine, _: engine.add_request([1], SamplingParams(stop_token_ids=[10**9])),
    lambda engine, _: engine.add_request([1], SamplingParams(logprobs=10**9)),
    lambda engine, _: engine.generate(b"bytes"),
    lambda engine, _: engine.generate([[1], [2]], [SamplingParams()]),
    lambda engine, _: engine.generate([[1], [10**9], [2]]),
    lambda engine, _: engine.stream(""),
    lambda engine, _: engine.chat([]),
)


def build_engine(milestone: str, mode: str, plan: Plan, loaded: LoadedModel) -> Any:
    """Return an audited engine of a milestone, as the plan configures it."""
    config = dict(plan.config)
    if milestone == WHOLE_PROMPTS:
        config["max_num_batched_tokens"] = max(LEAST_BUDGET, config["max_num_batched_tokens"])
    engine: Any = audited_engine_class(milestone, mode)(
        EngineConfig(model=loaded.name, device="cpu", enable_overlap=mode != "serial", **config),
        loaded,
        *_drafters(milestone, plan),
    )
    if hasattr(engine.core.scheduler, "retract"):
        force_retractions(engine.core.scheduler, plan.retract_every)
    return engine


def _drafters(milestone: str, plan: Plan) -> list[PlannedDrafter]:
    """Return the last argument of an engine with drafts, and nothing for all others."""
    if milestone != "speculative":
        return []
    return [PlannedDrafter(plan, load(milestone, "drafter").NGramDrafter())]


class PlannedDrafter:
    """Guesses for the requests of one plan. It never guesses a token with a fault.

    Such a guess would be fed before its request reaches the fault, or for another request.
    """

    def __init__(self, plan: Plan, lookup: Any) -> None:
        """lookup: the drafter that the engine would have by default."""
        self.lookup = lookup
        self.chance = random.Random(f"{plan.seed}/{plan.number}/drafts")
        self.right = self.chance.choice(RIGHT)
        requests = [r for a in chain(plan.arrivals, plan.afterwards) for r in a.requests]
        self.texts = [tokens for request in requests for tokens in request.all_tokens]
        faults = [request.fault for request in requests if request.fault is not None]
        self.faults = {(fault.position, fault.token) for fault in faults}

    def propose(self, request: Request, count: int) -> list[int]:
        assert min(request.token_ids) >= 0, "a drafter never sees a placeholder"
        start = request.num_tokens
        drafts: list[int] = self._guess(request, count)
        places = takewhile(lambda place: place not in self.faults, enumerate(drafts, start))
        return [token for _position, token in places]

    def _guess(self, request: Request, count: int) -> list[int]:
        if self.right is None:
            return list(self.lookup.propose(request, count))
        start = request.num_tokens
        text = next((t for t in self.texts if t[:start] == request.token_ids), [])
        guesses = text[start : start + self.chance.randint(0, count)]
        return [t if self.chance.random() < self.right else (t + 1) % 250 for t in guesses]


class Limits:
    """The limits of an engine, computed from its configuration and its pool."""

    def __init__(self, milestone: str, engine: Any) -> None:
        stats, config = engine.stats(), engine.config
        self.max_model_len: int = config.max_model_len
        has_pages = stats.kv_pages_total > 0
        self.pool_tokens = engine.core.scheduler.kv_cache.max_tokens if has_pages else None
        self.prompt_tokens: int = config.max_model_len - 1
        if milestone == WHOLE_PROMPTS:
            self.prompt_tokens = min(self.prompt_tokens, config.max_num_batched_tokens)
        if self.pool_tokens is not None:
            self.prompt_tokens = min(self.prompt_tokens, self.pool_tokens)

    def admits(self, request: PlannedRequest) -> bool:
        """Return whether the engine must admit a request, rather than refuse it by `ValueError`."""
        return len(request.prompt) <= self.prompt_tokens

    def most_tokens(self, request: PlannedRequest) -> int:
        """Return how many tokens a request may have, in prompt and output."""
        limits = [len(request.prompt) + request.params.max_tokens, self.max_model_len]
        if self.pool_tokens is not None:
            limits.append(self.pool_tokens + 1)
        return min(limits)


def add_too_long(engine: Any, arrival: Arrival) -> None:
    """Send a prompt that can never be computed. `generate` must refuse its neighbours too."""
    prompts = [request.prompt for request in arrival.requests]
    params = [request.asked for request in arrival.requests]
    if arrival.how == "generate":
        engine.generate(prompts, params, progress=False)
    else:
        (engine.stream if arrival.how == "stream" else engine.add_request)(prompts[0], params[0])


def call_from_another_thread(engine: Any) -> None:
    """Raise the error of `step` in a thread that has not called this engine before."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.step).result()


def check_dead(engine: Any) -> None:
    """Check that an engine that a failure has ended refuses each call."""
    for call in (engine.step, lambda: engine.generate([[1]], progress=False)):
        try:
            call()
        except EngineDeadError:
            continue
        raise SoakError("wrong", "the engine goes on after a failure that it did not undo")
