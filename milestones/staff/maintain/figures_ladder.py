"""Draw the picture of the README: the same requests on all milestones, on one time axis.

    python -m milestones.staff.maintain.figures_ladder            # draw ladder.svg again
    python -m milestones.staff.maintain.figures_ladder --record   # run the milestones first

The picture plays in real time: a second of it is a second of the recorded run. A run that is longer
than `LONGEST` plays faster, and the title says so.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from math import ceil

from ...course.delta import ROOT
from . import ladder_runs
from .drawing import Drawing, Player
from .ladder_runs import Lane, Recording

FILE = ROOT / "milestones" / "docs" / "ladder.svg"
LESSONS = {
    "m1_single": ("One request at a time;", "the others wait."),
    "m2_continuous": ("All requests in one batch;", "a new prompt pauses the others."),
    "m3_paged": ("Prompts in chunks,", "next to the others' tokens."),
    "m4_radix": ("The shared system prompt", "is computed only once."),
    "m5_overlap": ("The CPU plans the next step", "during the current one."),
}
PREFILL, DECODE = 1, 4  # colours
LEFT, FIELD, RIGHT, TOP = 206, 598, 76, 66  # pixels: the lanes and their margins
BAR, ROW, GAP = 6, 8, 18  # pixels: a bar, a request's row, and the space between two lanes
HOLD = 4.0  # seconds that the end of the run stays visible
LONGEST = 15.0  # seconds that the picture plays
NARROW = 0.5  # pixels: a shorter bar could not be seen


def draw(recording: Recording) -> str:
    """Return the picture as SVG."""
    picture = Picture(recording)
    for top, lane in zip(picture.tops, recording.lanes.values(), strict=True):
        picture.draw_bars(top, lane)
    picture.draw_cover()
    for top, (milestone, lane) in zip(picture.tops, recording.lanes.items(), strict=True):
        picture.draw_words(top, milestone, lane)
    picture.draw_axis()
    return picture.drawing.text()


class Picture:
    """The drawing, and the places in it. The order matters: a cover hides what comes later."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.seconds = max(lane.seconds for lane in recording.lanes.values())
        self.speed = ceil(self.seconds / LONGEST)
        self.scale = FIELD / self.seconds  # pixels of a second
        lane_height = len(recording.arrivals) * ROW + GAP
        self.tops = [TOP + number * lane_height for number in range(len(recording.lanes))]
        self.bottom = self.tops[-1] + lane_height
        pace = "in real time" if self.speed == 1 else f"{self.speed} times as fast as they were"
        count = len(recording.arrivals)
        self.drawing = Drawing(
            LEFT + FIELD + RIGHT, self.bottom + 44,
            f"{count} chats on five engines: the same prompts and answers, {pace}",
        )  # fmt: skip
        self.drawing.rules.append(".b{font-size:13px;font-weight:600}line:not(.m){stroke:#8b949e}")
        self.player = Player(self.drawing, self.seconds, HOLD, self.speed)

    def draw_bars(self, top: float, lane: Lane) -> None:
        """Draw a row for each request: a line from its arrival to its end, and its forwards."""
        for request, (arrival, end) in enumerate(
            zip(self.recording.arrivals, lane.ends, strict=True)
        ):
            y = top + request * ROW
            self.drawing.line(self._x(arrival), y + BAR / 2, self._x(end))
            for first, last, is_prefill in spans(lane.forwards(request)):
                start, stop = self._x(lane.steps[first][0]), self._x(lane.steps[last][1])
                width = max(NARROW, stop - start)
                self.drawing.rect(start, y, width, BAR, PREFILL if is_prefill else DECODE)

    def draw_cover(self) -> None:
        """Hide the future: the cover and the line at its left edge move to the right."""
        with self.player.moving("cover", FIELD):
            self.drawing.cover(LEFT, TOP - 4, FIELD + RIGHT, self.bottom - TOP)
            self.drawing.upright(LEFT, TOP - 4, self.bottom)

    def draw_words(self, top: float, milestone: str, lane: Lane) -> None:
        """Write the name and the lesson of a lane, the number of requests done, and the time."""
        self.drawing.label(12, top + 9, milestone, "start", kind="b")
        for i, words in enumerate(LESSONS[milestone]):
            self.drawing.label(12, top + 25 + 14 * i, words, "start")
        name, count = milestone.partition("_")[0], len(lane.ends)
        times = [0.0, *sorted(lane.ends)]
        for done, (start, end) in enumerate([*pairwise(times), (times[-1], None)]):
            if start != end:
                with self.player.shown(f"{name}-{done}", start, end):
                    self.drawing.label(12, top + 55, f"{done} of {count} done", "start")
        with self.player.shown(f"{name}-s", lane.seconds):
            y = top + count * ROW / 2 + 5
            text = f"{lane.seconds:.1f} s"
            self.drawing.label(self._x(lane.seconds) + 8, y, text, "start", kind="t")

    def draw_axis(self) -> None:
        """Draw the seconds, the legend, and where and how this was recorded."""
        self.drawing.legend(12, 44, [(PREFILL, False, "prompt tokens are computed"),
                                     (DECODE, False, "output tokens are computed")])  # fmt: skip
        self.drawing.line(404, 40, 424)
        self.drawing.label(429, 44, "the request waits", "start")
        self.drawing.line(LEFT, self.bottom, LEFT + FIELD)
        for second in range(0, ceil(self.seconds), self.speed):
            self.drawing.label(self._x(second), self.bottom + 14, f"{second} s")
        self.drawing.label(12, self.bottom + 34, self._note(), "start")

    def _x(self, second: float) -> float:
        return round(LEFT + second * self.scale, 1)

    def _note(self) -> str:
        prompts = next(iter(self.recording.lanes.values())).prompt_tokens
        first, second = self.recording.arrivals[:2]
        return (
            f"{self.recording.model} in float32, {self.recording.machine}. One chat every "
            f"{second - first:g} s, prompts of {min(prompts)} to {max(prompts)} tokens."
        )


def spans(forwards: list[tuple[int, bool]]) -> list[tuple[int, int, bool]]:
    """Join the steps of a request that follow each other and are of the same kind."""
    spans: list[tuple[int, int, bool]] = []
    for step, is_prefill in forwards:
        if spans and spans[-1][1] == step - 1 and spans[-1][2] == is_prefill:
            spans[-1] = (spans[-1][0], step, is_prefill)
        else:
            spans.append((step, step, is_prefill))
    return spans


def main() -> None:
    """Record if it is asked for, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="run all milestones first")
    if parser.parse_args().record:
        ladder_runs.record()
    FILE.write_text(draw(ladder_runs.load()), encoding="utf-8")


if __name__ == "__main__":
    main()
