"""The 14 requests of the handouts on one engine, observed after each step.

The lengths are drawn with a fixed seed, the model is `tiny-llama`, and end-of-sequence is ignored.
A run is therefore the same on every machine. `measure m3 --workload` counts it, and draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import EngineConfig, SamplingParams

from ...chain import below, load, short
from ...drawing.memory import Held, Moment, memory_svg, retracted
from .measuring import TINY, Row, short_and_long

NUM_REQUESTS = 14
MAX_MODEL_LEN = 96
PAGE_SIZE = 8
NUM_PAGES = 24
FEW_ROWS = NUM_PAGES * PAGE_SIZE // MAX_MODEL_LEN  # rows that take the memory of the pages
SPACING = 3  # steps between arrivals in the pictures


class Job(NamedTuple):
    """A request: its arrival (a step), its prompt, and its number of output tokens."""

    name: str
    arrival: int
    prompt: list[int]
    max_tokens: int


def jobs(spacing: int) -> list[Job]:
    """Return short and long requests, two in every `spacing` steps. 0: all arrive at once."""
    return [
        Job(chr(ord("A") + i), i // 2 * spacing, *request)
        for i, request in enumerate(short_and_long())
    ]


def config(model: str = TINY, **fields: Any) -> EngineConfig:
    """Return the configuration of all runs, with these fields."""
    return EngineConfig(model=model, device="cpu", max_model_len=MAX_MODEL_LEN, **fields)


def of_pages(model: str = TINY, num_pages: int = NUM_PAGES) -> EngineConfig:
    """Return the configuration of an engine with pages: by default, the memory of a few rows."""
    return config(model, max_num_seqs=NUM_REQUESTS, page_size=PAGE_SIZE, num_pages=num_pages)


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


def counts_of(engine: Any, moments: list[Moment], size: int | None) -> Row:
    """Return forwards, padding, the share held and not written, most requests, and retractions.

    size: slots of a row or page. None: the memory is always exactly as large as its content.
    """
    written = sum(n for moment in moments for _, n in moment.held.values())
    reserved = size * sum(len(moment.held) for moment in moments) if size else written
    most = max(len({owner for owner, _ in moment.held.values()}) for moment in moments)
    stats = engine.stats()
    return (
        f"{stats.num_steps}", f"{stats.padding_tokens}", f"{1 - written / reserved:.0%}",
        f"{most}", f"{stats.num_retractions}",
    )  # fmt: skip


def by_workload(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m3: the requests of the handout, on m2 and in pools of `sizes` pages. All wait at the start.

    The last column has the number of retractions, and the step before the first of them.
    """
    lower = below(milestone)
    assert lower is not None, "m3 lies on m2"
    runs = [(lower, FEW_ROWS, "rows", MAX_MODEL_LEN, config(model, max_num_seqs=FEW_ROWS))]
    for pages in map(int, sizes):
        runs.append((milestone, pages, "pages", PAGE_SIZE, of_pages(model, pages)))
    for name, count, unit, size, fields in runs:
        with load(name).LLMEngine(fields) as engine:
            moments = list(watch(engine, jobs(0)))
            *counts, retractions = counts_of(engine, moments, size)
        first = min(retracted(moments), default=None)
        after = "" if first is None else f", after {first}"
        yield f"{short(name)}, {count} {unit}", *counts, f"{retractions}{after}"


def pages_svg(moments: list[Moment]) -> str:
    """Draw the pages over time, as in the handout of m3."""
    title = (
        f"The same requests in {NUM_PAGES} pages of {PAGE_SIZE} tokens: "
        f"the memory of {FEW_ROWS} rows"
    )
    return memory_svg(title, "page", moments, list(range(1, NUM_PAGES + 1)), PAGE_SIZE, 17)


def draw(milestone: str, model: str, path: Path) -> None:
    """Draw the pages of an engine. The requests arrive as in the picture of the handout."""
    with load(milestone).LLMEngine(of_pages(model)) as engine:
        path.write_text(pages_svg(list(watch(engine, jobs(SPACING)))), encoding="utf-8")
