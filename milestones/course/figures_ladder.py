"""Draw the picture of the README: the same requests on all milestones, on one time axis.

    python -m milestones.course.figures_ladder            # draw milestones/ladder.svg again
    python -m milestones.course.figures_ladder --record   # run the milestones first: `ladder_runs`

The picture plays in real time: a second of it is a second of the recorded run.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from math import ceil

from ..delta import ROOT
from . import ladder_runs
from .ladder_runs import Lane, Recording
from .svg import Drawing, Player

FILE = ROOT / "milestones" / "ladder.svg"
LESSONS = {
    "m1_single": ("One request at a time;", "the others wait."),
    "m2_continuous": ("All requests in one batch;", "a new prompt stops the others."),
    "m3_paged": ("Prompts in chunks,", "next to the others' tokens."),
    "m4_radix": ("The shared system prompt", "is computed only once."),
    "m5_overlap": ("The CPU plans the next step", "during the current one."),
}
PREFILL, DECODE = 1, 4  # colours
WIDTH, LEFT, RIGHT, TOP = 880, 196, 76, 66  # pixels
BAR, ROW, GAP = 6, 8, 18  # pixels: a bar, a request's row, and the space between two lanes
HOLD = 4.0  # seconds that the end of the run stays visible
NARROW = 0.5  # pixels: a shorter bar could not be seen


def draw(recording: Recording) -> str:
    """Return the picture as SVG."""
    longest = max(lane.seconds for lane in recording.lanes.values())
    count = len(recording.arrivals)
    field, lane_height = WIDTH - LEFT - RIGHT, count * ROW
    scale = field / longest
    bottom = TOP + len(recording.lanes) * (lane_height + GAP)
    title = f"{count} chats on five engines: the same prompts and answers, in real time"
    drawing = Drawing(WIDTH, bottom + 44, title)
    drawing.rules.append(".b{font-size:13px;font-weight:600}line:not(.m){stroke:#8b949e}")
    player = Player(drawing, longest, HOLD)
    drawing.legend(12, 44, [(PREFILL, False, "prompt tokens are computed"),
                            (DECODE, False, "output tokens are computed")])  # fmt: skip
    drawing.line(436, 40, 456)
    drawing.label(461, 44, "the request waits", "start")
    for number, lane in enumerate(recording.lanes.values()):
        _bars(drawing, lane, recording.arrivals, TOP + number * (lane_height + GAP), scale)
    with player.moving("cover", field):
        drawing.cover(LEFT, TOP - 4, WIDTH, bottom - TOP)
        drawing.upright(LEFT, TOP - 4, bottom)
    for number, (milestone, lane) in enumerate(recording.lanes.items()):
        _words(drawing, player, milestone, lane, TOP + number * (lane_height + GAP), scale)
    drawing.line(LEFT, bottom, LEFT + field)
    for second in range(ceil(longest)):
        drawing.label(LEFT + second * scale, bottom + 14, f"{second} s")
    drawing.label(12, bottom + 34, _note(recording), "start")
    return drawing.text()


def _bars(drawing: Drawing, lane: Lane, arrivals: list[float], top: float, scale: float) -> None:
    """Draw a lane: a row for each request, with a line from its arrival to its end."""
    for request, (arrival, end) in enumerate(zip(arrivals, lane.ends, strict=True)):
        y = top + request * ROW
        drawing.line(LEFT + arrival * scale, y + BAR / 2, LEFT + end * scale)
        for first, last, is_prefill in _spans(lane.forwards(request)):
            start, stop = lane.steps[first][0] * scale, lane.steps[last][1] * scale
            width = max(NARROW, stop - start)
            drawing.rect(round(LEFT + start, 1), y, round(width, 1), BAR,
                         PREFILL if is_prefill else DECODE)  # fmt: skip


def _spans(forwards: list[tuple[int, bool]]) -> list[tuple[int, int, bool]]:
    """Join the steps of a request that follow each other and are of the same kind."""
    spans: list[tuple[int, int, bool]] = []
    for step, is_prefill in forwards:
        if spans and spans[-1][1] == step - 1 and spans[-1][2] == is_prefill:
            spans[-1] = (spans[-1][0], step, is_prefill)
        else:
            spans.append((step, step, is_prefill))
    return spans


def _words(
    drawing: Drawing, player: Player, milestone: str, lane: Lane, top: float, scale: float
) -> None:
    """Write the name and the lesson of a lane, the number of requests done, and the time."""
    drawing.label(12, top + 9, milestone, "start", kind="b")
    for i, words in enumerate(LESSONS[milestone]):
        drawing.label(12, top + 25 + 14 * i, words, "start")
    name, count = milestone.partition("_")[0], len(lane.ends)
    times = [0.0, *sorted(lane.ends)]
    for done, (start, end) in enumerate([*pairwise(times), (times[-1], None)]):
        if start != end:
            with player.shown(f"{name}-{done}", start, end):
                drawing.label(12, top + 55, f"{done} of {count} done", "start")
    with player.shown(f"{name}-s", lane.seconds):
        x = LEFT + lane.seconds * scale + 8
        drawing.label(x, top + count * ROW / 2 + 5, f"{lane.seconds:.1f} s", "start", kind="t")


def _note(recording: Recording) -> str:
    """Return where and how this was recorded."""
    prompts = next(iter(recording.lanes.values())).prompt_tokens
    return (
        f"{recording.model} in float32, {recording.machine}. One chat every "
        f"{recording.arrivals[1] - recording.arrivals[0]:g} s, prompts of "
        f"{min(prompts)} to {max(prompts)} tokens."
    )


def main() -> None:
    """Record if it is asked for, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="run all milestones first")
    if parser.parse_args().record:
        ladder_runs.record()
    FILE.write_text(draw(ladder_runs.load()), encoding="utf-8")


if __name__ == "__main__":
    main()
