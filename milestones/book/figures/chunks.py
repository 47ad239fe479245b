"""m3: with small chunks, a long prompt waits; with large ones, the requests that decode wait."""

from __future__ import annotations

from itertools import pairwise

from common.clock import StepCosts

from ...drawing import svg
from ..core_run import make_core, request_of, steps
from ..figure import Control, Figure, Shown
from ..picture import frame, legend

LEFT, TOP, LANE, WIDTH = 52, 40, 30, 560  # pixels
LONG, ARRIVAL, OUTPUT = 200, 3, 40  # tokens; steps after which it arrives; tokens of A


def draw(chunk: int, token: int) -> Shown:
    """Draw the tokens of A over virtual time, while the long prompt of B is computed in chunks.

    chunk: the most tokens of a step. token: what a position takes in a forward, in microseconds.
    """
    costs = StepCosts(forward_token=token / 1000)
    core = make_core("m3", page_size=16, max_num_seqs=2, max_num_batched_tokens=chunk, costs=costs)
    requests = {"A": request_of("A", 4, OUTPUT), "B": request_of("B", LONG, 4)}
    arrived, times = 0.0, dict[str, list[float]](A=[], B=[])
    for number, step in enumerate(steps(core, requests, {"B": ARRIVAL}), start=1):
        if number == ARRIVAL:
            arrived = step.time
        for name in step.tokens:
            times[name].append(step.time)
    end = max(times["A"][-1], times["B"][-1])
    scale = WIDTH / end
    gap = max(after - before for before, after in pairwise(times["A"]))
    first = times["B"][0] - arrived
    parts = legend(LEFT, 18, {
        "request0": "a token of A", "request1": "a token of B", "prompt": "the prompt of B",
    })  # fmt: skip
    for index, name in enumerate("AB"):
        y = TOP + index * LANE
        parts.append(svg.text(LEFT - 12, y + 14, name, anchor="end"))
        if name == "B":
            width = first * scale
            parts.append(svg.rect(LEFT + arrived * scale, y + 6, width, 8, "prompt"))
        for at in times[name]:
            parts.append(svg.rect(LEFT + at * scale - 2, y, 3, 20, f"request{index}"))
    axis = TOP + 2 * LANE + 4
    parts.append(svg.line(LEFT, axis, LEFT + WIDTH, axis))
    parts.append(svg.text(LEFT + WIDTH, axis + 16, f"{end:.0f} ms", anchor="end"))
    words = (
        f"B waits {first:.1f} ms for its first token. The longest gap between two tokens of A is "
        f"{gap:.1f} ms."
    )
    return Shown(frame(parts, LEFT + WIDTH + 12, axis + 24, words), words, round(gap))


FIGURE = Figure(
    name="chunks",
    title="Chunks of a long prompt",
    question=(
        "A decodes, one token in 3.7 ms, when B arrives with a prompt of 200 tokens. A step "
        "computes at most 256 tokens, so the whole prompt is computed in one. A forward takes 3 ms "
        "and 0.05 ms for each token. How many milliseconds does A wait for its next token?"
    ),
    controls=(
        Control("chunk", "tokens of a step", 32, 2, 256),
        Control("token", "µs for a token", 50, 0, 200),
    ),
    draw=draw,
    asked={"chunk": 256},
)
