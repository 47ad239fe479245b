"""Draw the pictures of the handouts, and print the counters of m1 to m3.

`python -m milestones.staff.maintain.figures` takes everything from runs of the real engines
(`runs`; `figures_m4_m5` also from recorded ones), and draws the recorded results of benchmarks
again. The pictures change only when an engine or a recording does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common import LLMEngine, LoadedModel

from ...course.student.workload_run import (
    FEW_ROWS,
    MAX_MODEL_LEN,
    NUM_PAGES,
    NUM_REQUESTS,
    PAGE_SIZE,
    Job,
    counts_of,
    jobs,
    watch,
)
from ...drawing import chart, handout, svg
from ...drawing.memory import Moment
from ...lab.bench.curves import picture as curves
from . import figures_m4_m5, figures_memory
from .runs import ROWS, load, paged, single, slots

FOLDER = Path(__file__).resolve().parents[2]
LEFT = 40  # pixels: where a picture's field begins


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
    scale, bottom, width, parts = 3.6, 220, 28, list[str]()
    for step, (few, many) in enumerate(zip(cached, recomputed, strict=True)):
        x = LEFT + step * width
        for tokens, kind in ((many, "hot pale"), (few, "forward")):
            parts.append(svg.rect(x, bottom - tokens * scale, width - 6, tokens * scale, kind))
    parts += handout.axis(LEFT, bottom, width, len(cached), every=4)
    parts += handout.legend(
        LEFT, 44, [("forward", f"with the KV cache: {sum(cached)} tokens in all"),
                   ("hot pale", f"without it: {sum(recomputed)}")],
    )  # fmt: skip
    title = "Tokens computed in each step: 20 prompt tokens, 24 output tokens"
    return handout.document(parts, 740, 260, title)


def results() -> dict[str, str]:
    """Draw the results of measurements that are in the repository."""
    drawn: dict[str, Callable[[Any], str]] = {
        "curves": curves, "ladder": chart.bars, "load": chart.load,
    }  # fmt: skip
    found = {}
    for name, draw in drawn.items():
        file = f"docs/results/{name}"
        document = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))
        found[f"{file}.svg"] = draw(document)
    return found


def pictures(loaded: LoadedModel) -> dict[str, str]:
    """Draw all pictures. Returns them by path below `milestones/`."""
    return {
        "m1_single/work.svg": work_svg(loaded),
        **figures_memory.pictures(loaded),
        **figures_m4_m5.pictures(),
        **results(),
    }


def line(name: str, engine: Any, size: int | None, groups: list[list[Job]]) -> list[str]:
    """Return a row of the table. The groups run one after the other, each with all its requests.

    size: slots of a row or page. None: the memory is always exactly as large as its content.
    """
    moments: list[Moment] = [moment for group in groups for moment in watch(engine, group)]
    seen = sum(sum(moment.contexts) for moment in moments)
    # A forward over rows reads every row up to the longest context. Through a page table, a forward
    # reads only the slots of each context.
    read = sum(max(m.contexts, default=0) * len(m.contexts) for m in moments)
    numbers = read if size == MAX_MODEL_LEN else seen, seen
    return [name, *counts_of(engine, moments, size), *map(str, numbers)]


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
