"""m5: the lanes of host and forward, in the serial loop and overlapped, in virtual time."""

from __future__ import annotations

from common.clock import StepCosts

from ...drawing import svg
from ..core_run import Span, make_core, request_of, steps
from ..figure import Control, Figure, Shown
from ..picture import frame, legend

LEFT, TOP, LANE, WIDTH = 62, 46, 24, 560  # pixels
ROWS, MAX_TOKENS = 4, 12
KINDS = {"schedule": "plan", "launch": "work", "process": "output", "wait": "wait"}


def lanes_of(overlap: bool, costs: StepCosts) -> tuple[list[Span], list[Span]]:
    """Run m5 with four requests. Return the spans of the host and of the forwards."""
    core = make_core("m5", costs=costs, max_num_seqs=ROWS, enable_overlap=overlap)
    requests = {name: request_of(name, 8, MAX_TOKENS) for name in "ABCD"[:ROWS]}
    for _ in steps(core, requests):
        pass
    return core.runner.host, core.runner.forward


def draw(host: int, forward: int) -> Shown:
    """Draw both loops on one axis. host, forward: of a decode step, in tenths of a millisecond."""
    costs = StepCosts(host=host / 10, host_row=0, forward=forward / 10, forward_token=0)
    runs = {"serial": lanes_of(False, costs), "overlapped": lanes_of(True, costs)}
    end = max(host[-1].end for host, _ in runs.values())
    parts = legend(LEFT, 18, {
        "plan": "schedule", "work": "launch", "output": "process", "wait": "wait",
        "forward": "forward",
    })  # fmt: skip
    ends = dict[str, float]()
    for index, (name, (of_host, of_forward)) in enumerate(runs.items()):
        y = TOP + index * (2 * LANE + 30)
        parts.append(svg.text(8, y - 4, name, "t"))
        parts += lane(y, "host", of_host, end)
        parts += lane(y + LANE, "forward", of_forward, end)
        ends[name] = of_host[-1].end
    ratio = ends["serial"] / ends["overlapped"]
    words = (
        f"The serial loop takes {ends['serial']:.1f} ms, and the overlapped one "
        f"{ends['overlapped']:.1f} ms: it is {ratio:.2f} times as fast."
    )
    height = TOP + 2 * (2 * LANE + 30) - 10
    return Shown(frame(parts, LEFT + WIDTH + 10, height, words), words, round(100 * ratio))


def lane(y: float, name: str, spans: list[Span], end: float) -> list[str]:
    """Draw the spans of a lane. Forwards have two shades in turns."""
    parts = [svg.text(LEFT - 10, y + 15, name, anchor="end")]
    scale = WIDTH / end
    for number, span in enumerate(spans):
        kind = KINDS.get(span.name, "forward" if number % 2 else "forward pale")
        width = (span.end - span.start) * scale
        parts.append(svg.rect(LEFT + span.start * scale, y, width, LANE - 6, kind))
    return parts


FIGURE = Figure(
    name="overlap",
    title="What overlap hides",
    question=(
        "The host needs 3 ms for a step, and a forward takes 3 ms. How long does the serial loop "
        "take for 12 steps, in percent of the overlapped one?"
    ),
    controls=(
        Control("host", "host, tenths of a ms", 10, 0, 60),
        Control("forward", "forward, tenths of a ms", 30, 5, 60),
    ),
    draw=draw,
    asked={"host": 30},
)
