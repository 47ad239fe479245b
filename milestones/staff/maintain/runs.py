"""Small runs of m1 to m3 for the handouts: fixed requests, observed after each step.

The lengths are drawn with a fixed seed, the model is `tiny-llama`, and end-of-sequence is ignored.
A run is therefore the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import m1_single
import m2_continuous
import m3_paged
from common import EngineConfig, LLMEngine, LoadedModel, SamplingParams, load_model

from ...course.student.measuring import short_and_long

MODEL = "tiny-llama"
NUM_REQUESTS = 14
MAX_MODEL_LEN = 96
ROWS = 6  # of the slot cache
PAGE_SIZE = 8
NUM_PAGES = 24
FEW_ROWS = NUM_PAGES * PAGE_SIZE // MAX_MODEL_LEN  # rows that take the memory of the pages

# A row or page: the request that holds it, and how many of its slots are written.
Held = dict[int, tuple[str, int]]


class Job(NamedTuple):
    """A request: its arrival (a step), its prompt, and its number of output tokens."""

    name: str
    arrival: int
    prompt: list[int]
    max_tokens: int


class Moment(NamedTuple):
    """A step after its forward: the memory, and the contexts of the requests that decode."""

    held: Held
    contexts: list[int]
    num_retractions: int  # so far


def load() -> LoadedModel:
    """Load the model of all runs."""
    return load_model(EngineConfig(model=MODEL, device="cpu"))


def jobs(spacing: int) -> list[Job]:
    """Return short and long requests, two in every `spacing` steps. 0: all arrive at once."""
    return [
        Job(chr(ord("A") + i), i // 2 * spacing, *request)
        for i, request in enumerate(short_and_long())
    ]


def single(loaded: LoadedModel, *, use_cache: bool = True) -> LLMEngine:
    """Return the engine of m1_single."""
    return m1_single.LLMEngine(config(), loaded, use_cache=use_cache)


def slots(loaded: LoadedModel, rows: int = ROWS) -> LLMEngine:
    """Return the engine of m2_continuous."""
    return m2_continuous.LLMEngine(config(max_num_seqs=rows), loaded)


def paged(loaded: LoadedModel) -> LLMEngine:
    """Return the engine of m3_paged, with the memory of `FEW_ROWS` rows."""
    full = config(max_num_seqs=NUM_REQUESTS, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    return m3_paged.LLMEngine(full, loaded)


def config(**fields: Any) -> EngineConfig:
    """Return the configuration of all runs, with these fields."""
    return EngineConfig(model=MODEL, device="cpu", max_model_len=MAX_MODEL_LEN, **fields)


def watch(engine: Any, arrivals: list[Job]) -> Iterator[Moment]:
    """Serve the requests. Yields the moment of each step after the step has ended.

    The moment is that between the forward and the update, when no request has ended yet.
    """
    scheduler, moments = engine.core.scheduler, list[Moment]()
    update = scheduler.update_from_output

    def watched(batch: Any, sampled: Any) -> Any:
        moments.append(moment_of(scheduler, batch))
        return update(batch, sampled)

    scheduler.update_from_output = watched
    to_come, step = list(arrivals), 0
    while to_come or engine.has_unfinished_requests():
        while to_come and to_come[0].arrival <= step:
            job = to_come.pop(0)
            params = SamplingParams(max_tokens=job.max_tokens, temperature=0, ignore_eos=True)
            engine.add_request(job.prompt, params, job.name)
        engine.step()
        yield moments[-1]
        step += 1
    scheduler.update_from_output = update


def moment_of(scheduler: Any, batch: Any) -> Moment:
    """Return the moment of a step that was computed, and not updated yet."""
    counts = dict(zip(batch.requests, batch.num_scheduled_tokens, strict=True))
    held: Held = {}
    for request in scheduler.running:
        tokens = request.num_computed_tokens + counts.get(request, 0)
        held |= memory_of(scheduler, request, tokens)
    decoding = [r for r in batch.requests if r.num_tokens - r.num_computed_tokens == 1]
    contexts = [request.num_tokens for request in decoding]
    return Moment(held, contexts, scheduler.counters.num_retractions)


def memory_of(scheduler: Any, request: Any, tokens: int) -> Held:
    """Return the pages or the row that a request holds, with `tokens` of its tokens written."""
    kv_cache = getattr(scheduler, "kv_cache", None)
    if kv_cache is None:  # m1: a cache object, which is as large as its content
        return {0: (request.request_id, tokens)}
    if not hasattr(kv_cache, "pages_of"):
        return {request.row: (request.request_id, tokens)}
    size = kv_cache.page_size
    return {
        page: (request.request_id, min(max(tokens - i * size, 0), size))
        for i, page in enumerate(kv_cache.pages_of(request))
    }
