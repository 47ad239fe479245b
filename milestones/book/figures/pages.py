"""m3: the page table. Where is a token, and what happens when no page is free?"""

from __future__ import annotations

from typing import Any

from ...drawing import svg
from ..core_run import PROMPTS, make_core, request_of, steps
from ..figure import Control, Figure, Shown
from ..picture import frame, of_request

SLOT, LEFT, TOP, ROW = 15, 66, 30, 26  # pixels
MAX_TOKENS, SLOTS = 20, 48  # the slots of the pool, if no page of it is taken away
LAST_STEP = 60


def draw(size: int, less: int, step: int, position: int) -> Shown:
    """Draw the pool after a step: each page with its slots, and the rows of the page table.

    size: slots of a page. less: pages that are taken from the pool. position: a token of A.
    """
    num_pages = max(1, SLOTS // size - less)
    core = make_core("m3", num_pages, page_size=size, max_num_seqs=3, max_num_batched_tokens=64)
    requests = {name: request_of(name, length, MAX_TOKENS) for name, length in PROMPTS.items()}
    retracted, counted, number = list[int](), 0, 0
    for number, _ in enumerate(steps(core, requests), start=1):
        counters = core.scheduler.counters
        retracted += [number] * (counters.num_retractions - counted)
        counted = counters.num_retractions
        if number == step:
            break
    rows = {r.request_id: core.scheduler.kv_cache.pages_of(r) for r in core.scheduler.running}
    used = {r.request_id: r.num_computed_tokens for r in core.scheduler.running}
    held = {page: (n, i) for n, pages in rows.items() for i, page in enumerate(pages)}
    marked = (rows["A"][position // size], position % size) if position < used.get("A", 0) else None
    parts, height = picture(num_pages, size, held, used, marked)
    for index, (name, pages) in enumerate(rows.items()):
        y = height + 16 + index * 18
        listed = " ".join(map(str, pages))
        parts.append(svg.text(8, y, f"row of {name}:  {listed}"))
    words = words_of(number, rows, used, size, position, marked, retracted)
    wide = LEFT + pages_per_line(size) * (size * SLOT + 10) + 8
    shown = frame(parts, wide, height + 24 + 18 * len(rows), words)
    return Shown(shown, words, retracted[0] if retracted else 0)


def pages_per_line(size: int) -> int:
    """Return how many pages fit beside each other."""
    return max(1, 26 // size)


def picture(
    num_pages: int, size: int, held: dict[int, tuple[str, int]], used: dict[str, int],
    marked: tuple[int, int] | None,
) -> tuple[list[str], float]:  # fmt: skip
    """Draw the pages in the order of memory. Return the parts, and the y below them."""
    parts, per_line = [svg.text(8, 16, "pages, in the order of memory", "t")], pages_per_line(size)
    for page in range(1, num_pages + 1):
        line, column = divmod(page - 1, per_line)
        x, y = LEFT + column * (size * SLOT + 10), TOP + line * ROW
        if column == 0:
            parts.append(svg.text(LEFT - 10, y + 14, f"page {page}", anchor="end"))
        name, index = held.get(page, ("", 0))
        for slot in range(size):
            kind = "slot"
            if name:
                is_used = index * size + slot < used[name]
                kind = of_request(name) if is_used else f"{of_request(name)} pale"
            if (page, slot) == marked:
                kind += " marked"
            parts.append(svg.rect(x + slot * SLOT, y, SLOT - 1, ROW - 8, kind))
        if name:
            parts.append(svg.text(x + 3, y + 13, name, "chip-ink"))
    lines = -(-num_pages // per_line)
    return parts, TOP + lines * ROW


def words_of(
    step: int, rows: dict[str, Any], used: dict[str, int], size: int, position: int,
    marked: tuple[int, int] | None, retracted: list[int],
) -> str:  # fmt: skip
    """Say what the picture shows."""
    slots = sum(len(pages) * size for pages in rows.values())
    wasted = slots - sum(used.values())
    words = f"After step {step}, {slots} slots are held, and {wasted} of them are not written. "
    if marked is not None:
        words += f"Position {position} of A is in page {marked[0]}, slot {marked[1]}. "
    if retracted:
        words += f"Requests were retracted in step {', '.join(map(str, retracted))}."
    else:
        words += "No request was retracted."
    return words


FIGURE = Figure(
    name="pages",
    title="The page table",
    question=(
        "A, B and C have prompts of 10, 5 and 12 tokens, and each may generate 20. The pool has 12 "
        "pages of four slots. In which step is a request retracted for the first time?"
    ),
    controls=(
        Control("size", "slots of a page", 4, 1, 16),
        Control("less", "fewer pages", 0, 0, 8),
        Control("step", "step", 6, 1, LAST_STEP),
        Control("position", "position of A", 9, 0, 29),
    ),
    draw=draw,
    asked={"step": 17},
)
