"""Small runs of the lower rungs for the handouts: fixed requests, watched step by step.

Lengths are drawn with a fixed seed, the model is `tiny-llama`, end-of-sequence is ignored: a run is
the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import m1_single
import m2_continuous
import m3_paged
from common import EngineConfig, LoadedModel, OfflineEngine, SamplingParams, load_model

MODEL = "tiny-llama"
NUM_REQUESTS = 14
MAX_MODEL_LEN = 96
ROWS = 6  # of the slot cache
PAGE_SIZE = 8
NUM_PAGES = 24
FEW_ROWS = NUM_PAGES * PAGE_SIZE // MAX_MODEL_LEN  # of the same memory

Held = dict[
    int, tuple[str, int]
]  # a row or page: whose it is, and how many of its slots are written


class Job(NamedTuple):
    """A request: when it comes (a step), its prompt, how many tokens it gets."""

    name: str
    arrival: int
    prompt: list[int]
    max_tokens: int


class Moment(NamedTuple):
    """A step whose forward has run: the memory, and the contexts of those who decoded."""

    held: Held
    contexts: list[int]
    num_retractions: int  # so far


def load() -> LoadedModel:
    """The model of all runs."""
    return load_model(EngineConfig(model=MODEL, device="cpu"))


def jobs(spacing: int) -> list[Job]:
    """Short and long requests, two in every `spacing` steps; 0: all are there at once."""
    chance = random.Random(5)
    return [
        Job(
            name=chr(ord("A") + i),
            arrival=i // 2 * spacing,
            prompt=[chance.randrange(50) for _ in range(chance.randint(4, 32))],
            max_tokens=chance.randint(8, 64),
        )
        for i in range(NUM_REQUESTS)
    ]


def single(loaded: LoadedModel, *, use_cache: bool = True) -> OfflineEngine:
    """The first rung."""
    return m1_single.LLMEngine(config(), loaded, use_cache=use_cache)


def slots(loaded: LoadedModel, rows: int = ROWS) -> OfflineEngine:
    """The second rung."""
    return m2_continuous.LLMEngine(config(max_num_seqs=rows), loaded)


def paged(loaded: LoadedModel) -> OfflineEngine:
    """The third rung, in the memory of `FEW_ROWS` rows."""
    full = config(max_num_seqs=NUM_REQUESTS, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    return m3_paged.LLMEngine(full, loaded)


def config(**fields: Any) -> EngineConfig:
    """What all runs have in common, and these fields."""
    return EngineConfig(model=MODEL, device="cpu", max_model_len=MAX_MODEL_LEN, **fields)


def watch(engine: Any, arrivals: list[Job]) -> Iterator[Moment]:
    """Serve the requests; each step's moment, before its results are processed."""
    to_come, step = list(arrivals), 0
    while to_come or engine.has_unfinished_requests():
        while to_come and to_come[0].arrival <= step:
            job = to_come.pop(0)
            params = SamplingParams(max_tokens=job.max_tokens, temperature=0, ignore_eos=True)
            engine.add_request(job.prompt, params, job.name)
        batch = engine.scheduler.schedule()
        result = engine.run(batch)
        counts = dict(zip(batch.requests, batch.num_scheduled_tokens, strict=True))
        held: Held = {}
        for request in engine.scheduler.running:
            tokens = request.num_computed_tokens + counts.get(request, 0)
            held |= memory_of(engine.scheduler, request, tokens)
        decoding = [r for r in batch.requests if r.num_tokens - r.num_computed_tokens == 1]
        contexts = [request.num_tokens for request in decoding]
        yield Moment(held, contexts, engine.stats().num_retractions)
        engine.process(batch, result)
        step += 1


def memory_of(scheduler: Any, request: Any, tokens: int) -> Held:
    """The pages or the row that a request holds, of which so many tokens are written."""
    kv_cache = getattr(scheduler, "kv_cache", None)
    if kv_cache is None:  # m1: a cache object, as large as it need be
        return {0: (request.request_id, tokens)}
    if not hasattr(kv_cache, "pages_of"):
        return {request.row: (request.request_id, tokens)}
    size = kv_cache.page_size
    return {
        page: (request.request_id, min(max(tokens - i * size, 0), size))
        for i, page in enumerate(kv_cache.pages_of(request))
    }
