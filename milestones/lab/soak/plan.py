"""`Plan`: one random schedule as plain data, and how it is drawn.

The same seed, number and elective give the same plan. All milestones get the same plan, so a
schedule that fails on one can be tried on another. An elective gets a plan of its own, with what it
adds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from common import PoolingParams, SamplingParams
from common.config import POLICIES
from common.request import child_seed

from .answers import Continuation, Source
from .extras import EXTRAS, PLAIN, Extra
from .extras import MODELS as MODELS_OF
from .parts import RETRIED, Fault, FaultKind, PartFault
from .tiny_answers import TinySource

How = Literal["add", "generate", "stream", "refused"]

MAX_REQUESTS = 14
MAX_MODEL_LEN = (64, 64, 128)
MAX_TOKENS = (1, 1, 2, 3, 5, 8, 13, 20)
PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 24, 33, 70)
PAGE_SIZES = (1, 2, 3, 4, 5, 8, 13, 16, 16, 32, 64)
# Shared beginnings of prompts.
STEMS: tuple[list[int], ...] = ([], [], [7] * 16, [7] * 9 + [8] * 8, [9] * 66)
NUM_TINY_PROMPTS = 12  # their answers cost a forward per token, so there are only a few
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

HOW: tuple[How, ...] = ("add",) * 12 + ("generate", "stream", "refused")


@dataclass
class PlannedRequest:
    """A request, its certain answers, and the events of its life."""

    name: str
    prompt: list[int]
    params: SamplingParams
    answers: list[Continuation]  # one for each of its n outputs
    extra: Extra = PLAIN
    vector: list[float] | None = None  # in place of all answers
    fault: Fault | None = None
    abort_after: int | None = None  # steps after its arrival
    leave_after: int | None = None  # outputs of a stream

    @property
    def all_tokens(self) -> list[list[int]]:
        """Prompt and output, as if nothing ended it before `max_tokens`, for each output."""
        return [self.prompt + answer.token_ids for answer in self.answers]

    @property
    def asked(self) -> SamplingParams | PoolingParams:
        """The parameters that the engine gets."""
        return self.extra.pooling or self.params


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
    part_faults: list[PartFault] = field(default_factory=list)
    afterwards: list[Arrival] = field(default_factory=list)  # when the other requests have ended
    may_die: bool = False  # a failure of a part may end the engine
    may_fail: set[str] = field(default_factory=set)  # requests that this failure may end
    reset_every: int | None = None  # steps between two calls of `reset_prefix_cache`
    interrupt_chance: float = 0.0  # of each call
    stranger_at: int | None = None  # the step before which another thread calls the engine

    def remove_failures(self) -> None:
        """Remove all injected failures."""
        self.part_faults = []
        for arrival in self.arrivals:
            for request in arrival.requests:
                request.fault = None


def make_plan(seed: int, number: int, sources: dict[str, Source], milestone: str = "") -> Plan:
    """Draw schedule `number` of a run with this seed. An elective adds to it."""
    chance = random.Random(f"{seed}/{number}")
    model = chance.choice(MODELS)
    if milestone in MODELS_OF:
        model = chance.choice(MODELS_OF[milestone])
    arrivals = _arrivals(chance, sources[model], model, milestone)
    plan = Plan(
        seed, number, model, _config(chance), arrivals,
        retract_every=chance.choice([None, None, None, 2, 3, 7]),
        reset_every=chance.choice([None, None, 3, 10]),
        interrupt_chance=chance.choice([0.0, 0.0, 0.05, 0.3]),
        stranger_at=chance.choice([None, None, None, 2, 9]),
    )  # fmt: skip
    if chance.random() < 0.3:
        _add_faults(chance, plan)
    if chance.random() < 0.4:
        _add_part_faults(chance, plan)
    return plan


def _config(chance: random.Random) -> dict[str, Any]:
    page_size, max_model_len = chance.choice(PAGE_SIZES), chance.choice(MAX_MODEL_LEN)
    whole = -(-max_model_len // page_size)  # pages of the longest request
    pages = [None, max(1, whole // 2), whole, whole + 1, 2 * whole, 4 * whole]
    return {
        "max_num_seqs": chance.randint(1, 8),
        "max_num_batched_tokens": chance.choice([1, 3, 8, 24, 24, 50, 50, 2048, 2048]),
        "max_model_len": max_model_len,
        "page_size": page_size,
        "num_pages": chance.choice(pages),
        "attention_backend": chance.choice(["auto", "torch"]),
        "schedule_policy": chance.choice(POLICIES),
        "cuda_graph": chance.choice([True, True, False]),
        "disable_consecutive_prefill_overlap": chance.choice([False, False, True]),
        "seed": chance.randrange(1000),
        "max_loras": chance.choice([1, 1, 2, 4]),
    }


def _arrivals(chance: random.Random, source: Source, model: str, milestone: str) -> list[Arrival]:
    """Return calls at random steps: bursts, single requests, and idle steps between them."""
    arrivals, tick = list[Arrival](), 0
    to_come = chance.randint(1, MAX_REQUESTS)
    while to_come > 0:
        tick += chance.choice([0, 0, 0, 1, 1, 2, 5, 12])
        how: How = chance.choice(HOW)
        count = chance.randint(1, min(3, to_come)) if how == "generate" else how != "refused"
        names = [f"{to_come - i}" for i in range(count)]
        requests = [make_request(chance, source, model, name, milestone, how) for name in names]
        to_come -= max(1, count)
        arrivals.append(Arrival(tick, how, requests, bad=chance.randrange(1000)))
    return arrivals


def make_request(
    chance: random.Random, source: Source, model: str, name: str, milestone: str, how: How = "add"
) -> PlannedRequest:
    """Draw a request until its answers have certain first tokens."""
    extra = EXTRAS[milestone](chance, model) if milestone in EXTRAS else PLAIN
    if how != "add" and (extra.arguments or extra.pooling):
        extra = PLAIN  # only `add_request` takes them
    answers, num_outputs = list[Continuation](), chance.choice([1] * 9 + [2, 3])
    while not all(answer.token_ids for answer in answers) or not answers:
        drawn = chance if model == "hash" else random.Random(chance.randrange(NUM_TINY_PROMPTS))
        prompt = _prompt(drawn)
        if extra.pooling is not None and isinstance(source, TinySource):
            vector = source.vector(prompt, extra.pooling)
            return PlannedRequest(name, prompt, SamplingParams(max_tokens=1), [], extra, vector)
        max_tokens = chance.choice(MAX_TOKENS)
        sampling = dict(chance.choice(SAMPLING if model == "hash" else TINY_SAMPLING))
        if model == "hash" and "seed" in sampling:
            sampling["seed"] = chance.getrandbits(63)
        asked = max_tokens if model == "hash" else MAX_TOKENS[-1]
        alone = SamplingParams(**{**sampling, **extra.sampling})
        children = [
            alone.of_child(child_seed(alone.seed or 0, index)) for index in range(num_outputs)
        ]
        answers = [source.continuation(prompt, c, asked, extra.adapter) for c in children]
    uncertain = [len(answer.token_ids) for answer in answers if not answer.is_whole]
    max_tokens = min([max_tokens, *uncertain])
    answers = [answer.first(max_tokens) for answer in answers]
    stops = _stops(chance, source, answers[0].token_ids)
    params = SamplingParams(
        **{**sampling, **stops, **extra.sampling}, max_tokens=max_tokens, n=num_outputs,
        logprobs=chance.choice([None, None, None, 0, 3]),
    )  # fmt: skip
    request = PlannedRequest(name, prompt, params, answers, extra)
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


def _add_part_faults(chance: random.Random, plan: Plan) -> None:
    """Let parts of steps fail now and then. No request ends by that."""
    step = 0
    for _ in range(8):
        step += chance.randint(4, 25)
        part, skip = chance.choice(RETRIED), int(chance.expovariate(0.5))
        plan.part_faults.append(PartFault(part, step, skip, is_late=chance.random() < 0.5))


def _add_faults(chance: random.Random, plan: Plan) -> None:
    """Give up to two requests a fault, at a token that no other request has at that position."""
    candidates = [
        r for a in plan.arrivals for r in a.requests if a.how != "stream" and len(r.answers) == 1
    ]
    added = {id(r) for a in plan.arrivals if a.how == "add" for r in a.requests}
    every = [tokens for a in plan.arrivals for r in a.requests for tokens in r.all_tokens]
    every += [r.prompt for a in plan.arrivals for r in a.requests if r.vector is not None]
    fed = Counter((p, t) for tokens in every for p, t in enumerate(tokens))
    for request in chance.sample(candidates, min(len(candidates), chance.randint(1, 2))):
        kinds: list[FaultKind] = ["forward", "logits"]
        kind = chance.choice([*kinds, "text"] if id(request) in added else kinds)
        start = 0 if kind == "forward" else len(request.prompt) - 1
        (tokens,) = request.all_tokens
        # Padding is token 0: a fault must not be at such a token.
        places = [p for p in range(start, len(tokens) - 1) if tokens[p] and fed[p, tokens[p]] == 1]
        if kind == "text":
            places = list(range(len(request.prompt), len(tokens)))
        if places:
            position = chance.choice(places)
            request.fault = Fault(kind, position, tokens[position])
