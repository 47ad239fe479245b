"""Draw the pictures of the handouts, and print the counters of m1 to m3.

`python -m milestones.staff.maintain.figures` takes everything from runs of the real engines
(`runs`; `figures_m4_m5` also from recorded ones). The pictures in `milestones/<milestone>/*.svg`
change only when an engine or a recording does.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from common import LLMEngine, LoadedModel

from ...drawing import handout, svg
from . import figures_m4_m5
from .runs import (
    FEW_ROWS,
    MAX_MODEL_LEN,
    NUM_PAGES,
    NUM_REQUESTS,
    PAGE_SIZE,
    ROWS,
    Held,
    Job,
    Moment,
    jobs,
    load,
    paged,
    single,
    slots,
    watch,
)

FOLDER = Path(__file__).resolve().parents[2]
LEFT, TOP = 50, 58  # pixels: the corner of a picture's field
SPACING = 3  # steps between arrivals in the pictures


class Stay(NamedTuple):
    """A row or page that one request holds from step `start` on, with its used slots per step."""

    place: int
    name: str
    start: int
    written: list[int]


def stays(moments: list[Held]) -> list[Stay]:
    """Return which request held which row or page, from when and for how long."""
    found: list[Stay] = []
    current: dict[int, Stay] = {}
    for step, held in enumerate(moments):
        for place, (name, written) in held.items():
            stay = current.get(place)
            if stay is None or stay.name != name or stay.start + len(stay.written) != step:
                stay = current[place] = Stay(place, name, step, [])
                found.append(stay)
            stay.written.append(written)
    return found


def computed(engine: LLMEngine) -> int:
    """Return the number of tokens that an engine has computed so far."""
    return engine.stats().prefill_tokens + engine.stats().decode_tokens


def work_svg(loaded: LoadedModel) -> str:
    """Draw the tokens that each step of one request computes, with the cache and without."""
    job, series = Job("A", 0, list(range(20)), 24), []
    for use_cache in (True, False):
        engine = single(loaded, use_cache=use_cache)
        totals = [0, *(computed(engine) for _ in watch(engine, [job]))]
        series.append([b - a for a, b in pairwise(totals)])
    cached, recomputed = series
    scale, bottom, width, parts = 3.6, 215, 28, list[str]()
    for step, (few, many) in enumerate(zip(cached, recomputed, strict=True)):
        x = LEFT + step * width
        for tokens, color in ((many, handout.kind(1, light=True)), (few, handout.kind(4))):
            parts.append(svg.rect(x, bottom - tokens * scale, width - 6, tokens * scale, color))
    parts += handout.axis(LEFT, bottom, width, len(cached), every=4)
    parts += handout.legend(
        LEFT, 38, [(4, False, f"with the KV cache: {sum(cached)} tokens in all"),
                   (1, True, f"without it: {sum(recomputed)}")],
    )  # fmt: skip
    title = "Tokens computed in each step: 20 prompt tokens, 24 output tokens"
    return handout.document(parts, 760, 250, title)


def memory_svg(
    title: str, unit: str, moments: list[Moment], places: list[int], size: int, height: int
) -> str:
    """Draw rows or pages of `size` slots over time: held slots pale, written slots solid."""
    width = max(4, 800 // len(moments))
    end, bottom = LEFT + width * len(moments), TOP + height * len(places)
    index = {place: i for i, place in enumerate(places)}
    names = sorted({name for moment in moments for name, _ in moment.held.values()})
    parts: list[str] = []
    for place, i in index.items():
        y = TOP + (i + 1) * height - 1
        parts.append(svg.line(LEFT, y, end, y))
        if height > 12 or place % 4 == 0 or i == 0:
            middle = TOP + i * height + height / 2 + 3
            parts.append(svg.text(LEFT - 6, middle, f"{unit} {place}", anchor="end"))
    for stay in stays([moment.held for moment in moments]):
        x, y = LEFT + stay.start * width, TOP + index[stay.place] * height
        color, long = names.index(stay.name), width * len(stay.written)
        parts.append(svg.rect(x, y, long, height - 2, handout.kind(color, light=True)))
        heights = [(height - 2) * written / size for written in stay.written]
        parts.append(handout.staircase(x, y + height - 2, width, heights, color))
        if long > 8:
            parts.append(svg.text(x + 2, y + height - 4, stay.name, anchor="start"))
    for step, (before, after) in enumerate(pairwise(moments), start=1):
        if after.num_retractions > before.num_retractions:
            x = LEFT + step * width
            parts.append(svg.line(x, TOP - 6, x, bottom, "m"))
            parts.append(svg.text(x, TOP - 9, "a retraction", anchor="middle"))
    parts += handout.axis(LEFT, bottom + 4, width, len(moments), every=10)
    parts += handout.legend(LEFT, 38, [(4, False, "written"), (4, True, "held, but not written")])
    return handout.document(parts, end + 20, bottom + 42, title)


def pictures(loaded: LoadedModel) -> dict[str, str]:
    """Draw all pictures. Returns them by path below `milestones/`."""
    rows = list(watch(slots(loaded), jobs(SPACING)))
    pages = list(watch(paged(loaded), jobs(SPACING)))
    return {
        "m1_single/work.svg": work_svg(loaded),
        "m2_continuous/slots.svg": memory_svg(
            f"The slot cache: {NUM_REQUESTS} requests in {ROWS} rows of {MAX_MODEL_LEN} tokens",
            "row", rows, list(range(ROWS)), MAX_MODEL_LEN, 34,
        ),
        "m3_paged/pages.svg": memory_svg(
            f"The same requests in {NUM_PAGES} pages of {PAGE_SIZE} tokens: "
            f"the memory of {FEW_ROWS} rows",
            "page", pages, list(range(1, NUM_PAGES + 1)), PAGE_SIZE, 10,
        ),
        **figures_m4_m5.pictures(),
    }  # fmt: skip


def line(name: str, engine: Any, size: int | None, groups: list[list[Job]]) -> list[str]:
    """Return a row of the table. The groups run one after the other, each with all its requests.

    size: slots of a row or page. None: the memory is always exactly as large as its content.
    """
    moments: list[Moment] = [moment for group in groups for moment in watch(engine, group)]
    written = sum(n for moment in moments for _, n in moment.held.values())
    reserved = size * sum(len(moment.held) for moment in moments) if size else written
    most = max(len({owner for owner, _ in moment.held.values()}) for moment in moments)
    seen = sum(sum(moment.contexts) for moment in moments)
    # A forward over rows reads every row up to the longest context. Through a page table, a forward
    # reads only the slots of each context.
    read = sum(max(m.contexts, default=0) * len(m.contexts) for m in moments)
    stats = engine.stats()
    numbers = (
        stats.num_steps, stats.padding_tokens, f"{1 - written / reserved:.0%}", most,
        stats.num_retractions, read if size == MAX_MODEL_LEN else seen, seen,
    )  # fmt: skip
    return [name, *map(str, numbers)]


def table(loaded: LoadedModel) -> Table:
    """Run the same requests on every engine, and count. The counters are equal on all machines."""
    all_jobs = jobs(spacing=0)
    batches = [all_jobs[i : i + ROWS] for i in range(0, NUM_REQUESTS, ROWS)]
    result = Table(title=f"{NUM_REQUESTS} requests, {sum(j.max_tokens for j in all_jobs)} tokens")
    for column in ("", "forwards", "padding", "unwritten", "at once", "retracted", "read", "seen"):
        result.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in (
        line("m1, one by one", single(loaded), None, [all_jobs]),
        line(f"m2, static, {ROWS} rows", slots(loaded), MAX_MODEL_LEN, batches),
        line(f"m2, {ROWS} rows", slots(loaded), MAX_MODEL_LEN, [all_jobs]),
        line(f"m2, {FEW_ROWS} rows", slots(loaded, FEW_ROWS), MAX_MODEL_LEN, [all_jobs]),
        line(f"m3, {NUM_PAGES} pages", paged(loaded), PAGE_SIZE, [all_jobs]),
    ):
        result.add_row(*row)
    return result


def main() -> None:
    """Write the pictures, and print the counters."""
    loaded = load()
    for name, text in pictures(loaded).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    Console(width=100).print(table(loaded))


if __name__ == "__main__":
    main()
