"""m2: static against continuous batching, with the arrivals that the reader chooses."""

from __future__ import annotations

from collections.abc import Mapping

from ...drawing import svg
from ..core_run import Step, make_core, request_of, steps
from ..figure import Control, Figure, Shown
from ..picture import frame, legend, of_request

CELL, LEFT, TOP, LANE = 17, 40, 56, 22  # pixels
PROMPT_TOKENS = 4
OUTPUTS = {"A": 12, "B": 3, "C": 3, "D": 6}


def continuous(rows: int, arrivals: Mapping[str, int]) -> list[Step]:
    """Run m2: a request joins as soon as a row is free."""
    core = make_core("m2", max_num_seqs=rows)
    requests = {name: request_of(name, PROMPT_TOKENS, n) for name, n in OUTPUTS.items()}
    return list(steps(core, requests, arrivals))


def static(rows: int, arrivals: Mapping[str, int]) -> list[Step]:
    """Run m2 with batches that do not change: the next one begins when the last one has ended.

    A batch is made of the oldest requests that are there when it begins.
    """
    found, left = list[Step](), dict(OUTPUTS)
    while left:
        there = [name for name in left if arrivals[name] <= len(found)]
        if not there:
            found.append(Step({}, []))
            continue
        oldest = sorted(there, key=lambda name: arrivals[name])[:rows]
        batch = {name: request_of(name, PROMPT_TOKENS, left.pop(name)) for name in oldest}
        for step in steps(make_core("m2", max_num_seqs=rows), batch):
            waits = [name for name in OUTPUTS if name in left and arrivals[name] <= len(found)]
            found.append(Step(step.computed, waits))
    return found


def lanes(run: list[Step], y: float, arrivals: Mapping[str, int], title: str) -> list[str]:
    """Draw a lane for each request: when it waits, computes its prompt, and generates."""
    parts = [svg.text(8, y - 8, title, "t")]
    for index, name in enumerate(OUTPUTS):
        top = y + index * LANE
        parts.append(svg.text(LEFT - 10, top + 14, name, anchor="end"))
        there = [number for number, step in enumerate(run) if name in step.computed]
        for number in range(arrivals[name], (there or [len(run) - 1])[-1] + 1):
            computed = run[number].computed.get(name)
            x = LEFT + number * CELL
            if computed is None:
                parts.append(svg.rect(x, top + 7, CELL - 2, 4, "wait"))
            else:
                kind = "prompt" if computed[0] == 0 else of_request(name)
                parts.append(svg.rect(x, top, CELL - 2, LANE - 4, kind, rx=2))
    return parts


def draw(rows: int, b: int, c: int, d: int) -> Shown:
    """Draw both schedules above each other, on one axis of steps. A arrives first."""
    arrivals = {"A": 0, "B": b, "C": c, "D": d}
    runs = {"static": static(rows, arrivals), "continuous": continuous(rows, arrivals)}
    below = TOP + len(OUTPUTS) * LANE + 34
    parts = legend(LEFT, 18, {"prompt": "prompt", "request0": "output", "wait": "waits"})
    parts += lanes(runs["static"], TOP, arrivals, "static batches")
    parts += lanes(runs["continuous"], below, arrivals, "continuous batching")
    first = {
        name: next(n for n, step in enumerate(run) if "D" in step.computed) + 1
        for name, run in runs.items()
    }
    words = (
        f"Static batches take {len(runs['static'])} steps, and D gets its first token in step "
        f"{first['static']}. Continuous batching takes {len(runs['continuous'])} steps, and D gets "
        f"it in step {first['continuous']}."
    )
    width = LEFT + CELL * max(map(len, runs.values())) + 10
    height = below + len(OUTPUTS) * LANE + 8
    return Shown(frame(parts, max(360, width), height, words), words, first["continuous"])


FIGURE = Figure(
    name="batches",
    title="Static or continuous",
    question=(
        "A generates 12 tokens, B and C three each, and D six. They arrive together, and there are "
        "two rows. With static batches, D gets its first token in step 13. In which step does it "
        "get it with continuous batching? A request that joins takes a step for its prompt alone."
    ),
    controls=(
        Control("rows", "rows", 4, 1, 4),
        Control("b", "B arrives after step", 0, 0, 20),
        Control("c", "C arrives after step", 0, 0, 20),
        Control("d", "D arrives after step", 0, 0, 20),
    ),
    draw=draw,
    asked={"rows": 2},
)
