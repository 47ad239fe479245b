"""m1: what a step computes, with the KV cache and without. The answer is the area of a triangle."""

from __future__ import annotations

from ...drawing import svg
from ..core_run import PROMPTS, make_core, request_of, steps
from ..figure import Control, Figure, Shown
from ..picture import frame, legend

CELL, LEFT, TOP = 18, 64, 34  # pixels
PROMPT_TOKENS, MAX_TOKENS = PROMPTS["B"], 16


def draw(cache: int, tokens: int, step: int) -> Shown:
    """Draw the positions that each of the first `step` steps computes: one row for each step."""
    core = make_core("m1", use_cache=bool(cache))
    request = request_of("B", PROMPT_TOKENS, tokens)
    rows = [run.computed["B"] for run in steps(core, {"B": request})]
    shown = rows[:step]
    known, again = 0, 0
    parts = legend(LEFT, 18, {
        "prompt": "prompt", "output": "output", "hot": "computed again", "held": "in the cache",
    })  # fmt: skip
    for row, (start, end) in enumerate(shown):
        y = TOP + row * CELL
        parts.append(svg.text(LEFT - 8, y + 13, f"step {row + 1}", anchor="end"))
        for position in range(end):
            kind = "held" if position < start else "hot" if position < known else "new"
            if kind == "new":
                kind = "prompt" if position < PROMPT_TOKENS else "output"
            again += kind == "hot"
            parts.append(svg.rect(LEFT + position * CELL, y, CELL - 2, CELL - 2, kind, rx=2))
        known = end
    computed = sum(end - start for start, end in shown)
    words = f"{len(shown)} steps have computed {computed} keys"
    words += f", {again} of them for the second time or later." if again else ", each of them once."
    width = max(440, LEFT + (PROMPT_TOKENS + tokens) * CELL)
    return Shown(frame(parts, width, TOP + tokens * CELL + 4, words), words, computed)


FIGURE = Figure(
    name="triangle",
    title="The triangle",
    question=(
        "B has a prompt of five tokens, and eight are generated. With the cache, the model "
        "computes 5 + 7 = 12 keys in each layer. How many does it compute without the cache?"
    ),
    controls=(
        Control("cache", "KV cache", 1),
        Control("tokens", "output tokens", 8, 1, MAX_TOKENS),
        Control("step", "steps", MAX_TOKENS, 1, MAX_TOKENS),
    ),
    draw=draw,
    asked={"cache": 0},
)
