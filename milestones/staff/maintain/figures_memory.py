"""Draw batches and memory for the handouts of m2 and m3. `figures.py` writes the pictures.

m2_continuous/batches.svg   five requests, as static batches and as a continuous one
m2_continuous/slots.svg     the rows of m2 over time
m3_paged/table.svg          the page table at one step of the next picture
m3_paged/pages.svg          the pages of m3 over time
"""

from __future__ import annotations

from common import LoadedModel

from ...course.student.workload_run import (
    MAX_MODEL_LEN,
    NUM_PAGES,
    NUM_REQUESTS,
    PAGE_SIZE,
    SPACING,
    Job,
    jobs,
    pages_svg,
    watch,
)
from ...drawing import handout, svg
from ...drawing.memory import LEFT, RULES, Moment, kind, memory_svg, retracted
from .runs import ROWS, paged, slots

TABLE_STEP, POSITION = 80, 34  # of `table.svg`: the step, and a position of the followed request
OUTPUTS = (20, 3, 7, 12, 10)  # tokens of the requests in `batches.svg`
BATCH_ROWS = 3


def batches_svg(loaded: LoadedModel) -> str:
    """Draw the steps in which each request has a row: in static batches, and in a continuous one.

    A static batch ends with its longest request. Until then, the rows of the others stay empty.
    """
    requests = [Job(chr(ord("A") + i), 0, [1 + i] * 4, n) for i, n in enumerate(OUTPUTS)]
    batches = [requests[:BATCH_ROWS], requests[BATCH_ROWS:]]
    runs = {
        name: [list(watch(slots(loaded, BATCH_ROWS), group)) for group in groups]
        for name, groups in (("static batches", batches), ("continuous", [requests]))
    }
    steps = max(sum(map(len, groups)) for groups in runs.values())
    width, row, y, parts = 600 // steps, 20, 72, list[str]()
    for words, groups in runs.items():
        count = sum(map(len, groups))
        parts.append(svg.text(12, y, f"{words}: {count} steps", "n"))
        first, tops = 0, {job.name: y + 8 + row * i for i, job in enumerate(requests)}
        for moments in groups:
            names = [{name for name, _ in moment.held.values()} for moment in moments]
            for name in sorted(set().union(*names)):
                mine = [step for step, held in enumerate(names) if name in held]
                x, long = LEFT + width * (first + mine[0]), width * len(mine)
                empty = width * (len(moments) - mine[-1] - 1) if len(groups) > 1 else 0
                parts.append(svg.rect(x, tops[name], long, row - 4, kind(name)))
                parts.append(svg.text(x + 4, tops[name] + 12, name, "chip-ink n"))
                if empty:
                    parts.append(svg.rect(x + long, tops[name], empty, row - 4, "hot pale"))
            first += len(moments)
        y += row * len(requests) + 34
    bottom = y - 22
    parts += handout.axis(LEFT, bottom, width, steps, every=5)
    parts += handout.legend(12, 44, [("hot pale", "the row is empty until the batch ends")])
    title = f"{len(requests)} requests in {BATCH_ROWS} rows"
    return handout.document(parts, LEFT + width * steps + 20, bottom + 38, title, RULES)


def table_svg(moments: list[Moment]) -> str:
    """Draw the page table of a step above its pages, and the way from a position to its slot."""
    held, cell, box = moments[TABLE_STEP - 1].held, 68, 27
    tables: dict[str, list[int]] = {}
    for page, (name, _) in held.items():
        tables.setdefault(name, []).append(page)
    followed = next(iter(retracted(moments).values()))
    most = max(map(len, tables.values()))
    parts = [svg.text(12, 50, "positions", "soft")]
    for column in range(most):
        first = column * PAGE_SIZE
        middle = LEFT + 24 + (column + 0.5) * cell
        parts.append(svg.text(middle, 50, f"{first} to {first + PAGE_SIZE - 1}", "soft",
                              anchor="middle"))  # fmt: skip
    memory, y = 52 + 26 * len(tables) + 72, 58.0
    for name, pages in tables.items():
        parts.append(svg.rect(LEFT - 10, y, 24, 22, kind(name), rx=4))
        parts.append(svg.text(LEFT + 2, y + 15, name, "chip-ink n", anchor="middle"))
        for column, page in enumerate(pages):
            x = LEFT + 24 + column * cell
            parts.append(svg.rect(x, y, cell - 4, 22, "free"))
            parts.append(svg.text(x + cell / 2 - 2, y + 15, f"page {page}", anchor="middle"))
        y += 26
    page = tables[followed][POSITION // PAGE_SIZE]
    row, x = list(tables).index(followed), LEFT + 24 + (POSITION // PAGE_SIZE) * cell
    parts.append(svg.rect(x, 58 + 26 * row, cell - 4, 22, "follow"))
    target = 12 + (page - 0.5) * box
    parts.append(svg.polyline([
        (x + cell / 2 - 2, 80 + 26 * row), (x + cell / 2 - 2, memory - 48), (target, memory - 34),
        (target, memory - 18),
    ], "arrow"))  # fmt: skip
    for number in range(1, NUM_PAGES + 1):
        left, owner = 12 + (number - 1) * box, held.get(number)
        parts.append(svg.text(left + box / 2, memory - 6, str(number), "soft", anchor="middle"))
        parts.append(svg.rect(left, memory, box - 3, 30, "free"))
        if owner:
            name, written = owner
            used = (box - 3) * written / PAGE_SIZE
            parts += [svg.rect(left, memory, box - 3, 30, f"{kind(name)} pale"),
                      svg.rect(left, memory, used, 30, kind(name)),
                      svg.text(left + box / 2 - 1.5, memory + 20, name, "chip-ink n",
                               anchor="middle")]  # fmt: skip
    parts.append(svg.rect(target - box / 2, memory, box - 3, 30, "follow"))
    slot = page * PAGE_SIZE + POSITION % PAGE_SIZE
    words = (
        f"Position {POSITION} of {followed}: table[{POSITION} // {PAGE_SIZE}] = {page}, so its "
        f"slot is {page} * {PAGE_SIZE} + {POSITION} % {PAGE_SIZE} = {slot}."
    )
    parts.append(svg.text(12, memory + 52, words))
    title = f"The page table at step {TABLE_STEP} of a run, and the {NUM_PAGES} pages of the memory"
    return handout.document(parts, 12 + NUM_PAGES * box + 9, memory + 64, title, RULES)


def pictures(loaded: LoadedModel) -> dict[str, str]:
    """Draw the pictures of m2 and m3. Returns them by path below `milestones/`."""
    rows = list(watch(slots(loaded), jobs(SPACING)))
    pages = list(watch(paged(loaded), jobs(SPACING)))
    return {
        "m2_continuous/batches.svg": batches_svg(loaded),
        "m2_continuous/slots.svg": memory_svg(
            f"The slot cache: {NUM_REQUESTS} requests in {ROWS} rows of {MAX_MODEL_LEN} tokens",
            "row", rows, list(range(ROWS)), MAX_MODEL_LEN, 34,
        ),
        "m3_paged/table.svg": table_svg(pages),
        "m3_paged/pages.svg": pages_svg(pages),
    }  # fmt: skip
