"""`Plan`: one random schedule as plain data. The same seed and number give the same plan.

A plan does not depend on the engine that runs it, so a schedule that fails on one milestone can be
tried on another.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from common import SamplingParams
from common.config import POLICIES

from .answers import Continuation, Source

MAX_REQUESTS = 14
MAX_MODEL_LEN = 64
MAX_TOKENS = (1, 1, 2, 3, 5, 8, 13, 20)
PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 24, 33)
STEMS: tuple[list[int], ...] = ([], [7] * 16, [7] * 9 + [8] * 8)  # shared beginnings of prompts
NUM_TINY_PROMPTS = 24  # their answers cost a forward per token, so there are only a few
MODELS = ("hash", "hash", "hash", "hash", "hash", "hash", "tiny-llama", "tiny-qwen3")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 3.0, "seed": 2, "top_k": 40},
    {"temperature": 4.0, "seed": -3, "min_p": 0.02},
    {"temperature": 0.0, "presence_penalty": 2.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0},
)
TINY_SAMPLING = (*SAMPLING, {"temperature": 0.9, "seed": 4, "top_p": 0.8})

How = Literal["add", "generate", "stream", "refused"]
HOW: tuple[How, ...] = ("add",) * 12 + ("generate", "stream", "refused")
FaultKind = Literal["forward", "logits", "text"]


@dataclass(frozen=True)
class Fault:
    """An injected failure of one request.

    forward: each forward that feeds this request's token at `position` raises.
    logits: the logits after this request's token at `position` have no finite distribution.
    text: the detokenizer raises for the output token at `position`.
    """

    kind: FaultKind
    position: int  # in prompt and output together
    token: int  # the token at `position`; no other request of the plan has it there


@dataclass
class PlannedRequest:
    """A request, its certain answer, and the events of its life."""

    name: str
    prompt: list[int]
    params: SamplingParams
    answer: Continuation
    fault: Fault | None = None
    abort_after: int | None = None  # steps after its arrival
    leave_after: int | None = None  # outputs of a stream

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and output, as if nothing ended it before `max_tokens`."""
        return self.prompt + self.answer.token_ids


@dataclass(frozen=True)
class Arrival:
    """One call before step `tick`, with the requests that it brings."""

    tick: int
    how: How
    requests: list[PlannedRequest]
    bad: int = 0  # which kind of bad input


@dataclass
class Plan:
    """A schedule: the engine's configuration, the arrivals, and the failures."""

    seed: int
    number: int
    model: str
    config: dict[str, Any]
    arrivals: list[Arrival]
    retract_every: int | None
    failing_forwards: list[int] = field(default_factory=list)  # by number, at least 4 apart
    reset_every: int | None = None  # steps between two calls of `reset_prefix_cache`
    interrupt_chance: float = 0.0  # of each call
    stranger_at: int | None = None  # the step before which another thread calls the engine

    def remove_failures(self) -> None:
        """Remove all injected failures."""
        self.failing_forwards = []
        for arrival in self.arrivals:
            for request in arrival.requests:
                request.fault = None


def make_plan(seed: int, number: int, sources: dict[str, Source]) -> Plan:
    """Draw schedule `number` of a run with this seed."""
    chance = random.Random(f"{seed}/{number}")
    model = chance.choice(MODELS)
    arrivals = _arrivals(chance, sources[model], model)
    plan = Plan(
        seed, number, model, _config(chance), arrivals,
        retract_every=chance.choice([None, None, None, 2, 3, 7]),
        reset_every=chance.choice([None, None, 3, 10]),
        interrupt_chance=chance.choice([0.0, 0.0, 0.05, 0.3]),
        stranger_at=chance.choice([None, None, None, 2, 9]),
    )  # fmt: skip
    if chance.random() < 0.3:
        _add_faults(chance, plan)
    if chance.random() < 0.25:
        at = 0
        for _ in range(8):
            at += chance.randint(4, 25)
            plan.failing_forwards.append(at)
    return plan


def _config(chance: random.Random) -> dict[str, Any]:
    page_size = chance.choice([1, 4, 16])
    whole = -(-MAX_MODEL_LEN // page_size)  # pages of the longest request
    pages = [None, whole // 2, whole, whole + 1, 2 * whole, 4 * whole]
    return {
        "max_num_seqs": chance.randint(1, 8),
        "max_num_batched_tokens": chance.choice([1, 3, 8, 24, 24, 50, 50, 2048, 2048]),
        "max_model_len": MAX_MODEL_LEN,
        "page_size": page_size,
        "num_pages": chance.choice(pages),
        "attention_backend": chance.choice(["auto", "torch"]),
        "schedule_policy": chance.choice(POLICIES),
        "cuda_graph": chance.choice([True, True, False]),
        "seed": chance.randrange(1000),
    }


def _arrivals(chance: random.Random, source: Source, model: str) -> list[Arrival]:
    """Return calls at random steps: bursts, single requests, and idle steps between them."""
    arrivals, tick = list[Arrival](), 0
    to_come = chance.randint(1, MAX_REQUESTS)
    while to_come > 0:
        tick += chance.choice([0, 0, 0, 1, 1, 2, 5, 12])
        how: How = chance.choice(HOW)
        count = chance.randint(1, min(3, to_come)) if how == "generate" else how != "refused"
        requests = [_request(chance, source, model, f"{to_come - i}", how) for i in range(count)]
        to_come -= max(1, count)
        arrivals.append(Arrival(tick, how, requests, bad=chance.randrange(1000)))
    return arrivals


def _request(
    chance: random.Random, source: Source, model: str, name: str, how: How
) -> PlannedRequest:
    """Draw a request until its answer has a certain first token."""
    while True:
        drawn = chance if model == "hash" else random.Random(chance.randrange(NUM_TINY_PROMPTS))
        prompt = _prompt(drawn)
        max_tokens = chance.choice(MAX_TOKENS)
        sampling = dict(chance.choice(SAMPLING if model == "hash" else TINY_SAMPLING))
        if model == "hash" and "seed" in sampling:
            sampling["seed"] = chance.getrandbits(63)
        asked = max_tokens if model == "hash" else MAX_TOKENS[-1]
        answer = source.continuation(prompt, SamplingParams(**sampling), asked)
        if answer.token_ids:
            break
    max_tokens = min(max_tokens, len(answer.token_ids))
    answer = Continuation(answer.token_ids[:max_tokens], answer.logprobs[:max_tokens])
    params = SamplingParams(
        max_tokens=max_tokens, **sampling, **_stops(chance, source, answer.token_ids),
        logprobs=chance.choice([None, None, None, 0, 3]),
    )  # fmt: skip
    request = PlannedRequest(name, prompt, params, answer)
    if how == "add" and chance.random() < 0.12:
        request.abort_after = int(chance.expovariate(0.2))
    if how == "stream" and chance.random() < 0.5:
        request.leave_after = chance.randint(1, 6)
    return request


def _prompt(chance: random.Random) -> list[int]:
    tail = [chance.randrange(1, 250) for _ in range(PROMPT_LENGTHS[-1])]
    return [*chance.choice(STEMS), *tail][: chance.choice(PROMPT_LENGTHS)]


def _stops(chance: random.Random, source: Source, token_ids: list[int]) -> dict[str, Any]:
    """Return stop strings, stop tokens and end of sequence, often from the answer itself."""
    stops: dict[str, Any] = {"ignore_eos": chance.random() < 0.5}
    if chance.random() < 0.15:
        text = source.text_of(token_ids, SamplingParams(max_tokens=1))
        start = chance.randrange(len(text) + 1)
        stops["stop"] = [text[start : start + chance.randint(1, 3)] or "stop", "never said"]
    if chance.random() < 0.15:
        stops["stop_token_ids"] = [chance.choice(token_ids), chance.randrange(259)]
    return stops


def _add_faults(chance: random.Random, plan: Plan) -> None:
    """Give up to two requests a fault, at a token that no other request has at that position."""
    candidates = [r for a in plan.arrivals for r in a.requests if a.how != "stream"]
    added = {id(r) for a in plan.arrivals if a.how == "add" for r in a.requests}
    every = [r.all_tokens for a in plan.arrivals for r in a.requests]
    fed = Counter((p, t) for tokens in every for p, t in enumerate(tokens))
    for request in chance.sample(candidates, min(len(candidates), chance.randint(1, 2))):
        kinds: list[FaultKind] = ["forward", "logits"]
        kind = chance.choice([*kinds, "text"] if id(request) in added else kinds)
        start = 0 if kind == "forward" else len(request.prompt) - 1
        tokens = request.all_tokens
        # Padding is token 0: a fault must not be at such a token.
        places = [p for p in range(start, len(tokens) - 1) if tokens[p] and fed[p, tokens[p]] == 1]
        if kind == "text":
            places = list(range(len(request.prompt), len(tokens)))
        if places:
            position = chance.choice(places)
            request.fault = Fault(kind, position, tokens[position])
