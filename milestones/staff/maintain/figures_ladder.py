"""Draw the picture of the README: the same requests on all milestones, on one time axis.

    python -m milestones.staff.maintain.figures_ladder            # draw ladder.svg again
    python -m milestones.staff.maintain.figures_ladder --record   # run the milestones first

The picture plays in real time: a second of it is a second of the recorded run. A run that is longer
than `LONGEST` plays faster, and the title says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import ceil

from ...chain import ROOT
from ...drawing import handout, svg
from . import ladder_runs
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
RULES = ".b{font-size:13px;font-weight:600}line:not(.m){stroke:#8b949e}"
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
    return picture.text()


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
        self.parts: list[str] = []
        self.player = Player(self.parts, self.seconds, HOLD, self.speed)

    def text(self) -> str:
        """Return the file."""
        pace = "in real time" if self.speed == 1 else f"{self.speed} times as fast as they were"
        count = len(self.recording.arrivals)
        title = f"{count} chats on five engines: the same prompts and answers, {pace}"
        rules = "".join([RULES, *self.player.rules])
        width, height = LEFT + FIELD + RIGHT, self.bottom + 44
        return handout.document(self.parts, width, height, title, rules)

    def draw_bars(self, top: float, lane: Lane) -> None:
        """Draw a row for each request: a line from its arrival to its end, and its forwards."""
        for request, (arrival, end) in enumerate(
            zip(self.recording.arrivals, lane.ends, strict=True)
        ):
            y = top + request * ROW
            self._line(self._x(arrival), y + BAR / 2, self._x(end))
            for first, last, is_prefill in spans(lane.forwards(request)):
                start, stop = self._x(lane.steps[first][0]), self._x(lane.steps[last][1])
                width = max(NARROW, stop - start)
                kind = handout.kind(PREFILL if is_prefill else DECODE)
                self.parts.append(svg.rect(start, y, width, BAR, kind))

    def draw_cover(self) -> None:
        """Hide the future: the cover and the line at its left edge move to the right."""
        with self.player.moving("cover", FIELD):
            self.parts += [svg.rect(LEFT, TOP - 4, FIELD + RIGHT, self.bottom - TOP, "p"),
                           svg.line(LEFT, TOP - 4, LEFT, self.bottom, "m")]  # fmt: skip

    def draw_words(self, top: float, milestone: str, lane: Lane) -> None:
        """Write the name and the lesson of a lane, the number of requests done, and the time."""
        self._words(12, top + 9, milestone, "b")
        for i, words in enumerate(LESSONS[milestone]):
            self._words(12, top + 25 + 14 * i, words)
        name, count = milestone.partition("_")[0], len(lane.ends)
        times = [0.0, *sorted(lane.ends)]
        for done, (start, end) in enumerate([*pairwise(times), (times[-1], None)]):
            if start != end:
                with self.player.shown(f"{name}-{done}", start, end):
                    self._words(12, top + 55, f"{done} of {count} done")
        with self.player.shown(f"{name}-s", lane.seconds):
            y = top + count * ROW / 2 + 5
            text = f"{lane.seconds:.1f} s"
            self._words(self._x(lane.seconds) + 8, y, text, "t")

    def draw_axis(self) -> None:
        """Draw the seconds, the legend, and where and how this was recorded."""
        self.parts += handout.legend(12, 44, [(PREFILL, False, "prompt tokens are computed"),
                                     (DECODE, False, "output tokens are computed")])  # fmt: skip
        self._line(404, 40, 424)
        self._words(429, 44, "the request waits")
        self._line(LEFT, self.bottom, LEFT + FIELD)
        for second in range(0, ceil(self.seconds), self.speed):
            self._words(self._x(second), self.bottom + 14, f"{second} s", anchor="middle")
        self._words(12, self.bottom + 34, self._note())

    def _line(self, x: float, y: float, end: float) -> None:
        self.parts.append(svg.line(x, y, end, y))

    def _words(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(svg.text(x, y, words, kind, anchor=anchor))

    def _x(self, second: float) -> float:
        return round(LEFT + second * self.scale, 1)

    def _note(self) -> str:
        prompts = next(iter(self.recording.lanes.values())).prompt_tokens
        first, second = self.recording.arrivals[:2]
        return (
            f"{self.recording.model} in float32, {self.recording.machine}. One chat every "
            f"{second - first:g} s, prompts of {min(prompts)} to {max(prompts)} tokens."
        )


class Player:
    """Plays a drawing over time: it moves and shows shapes by CSS, again and again.

    `rules` is its CSS. Without animation the drawing shows its end: in a program that cannot
    animate, and on a system with the setting "reduce motion".
    """

    def __init__(self, parts: list[str], seconds: float, hold: float, speed: float = 1) -> None:
        """Times are those of the run, which takes `seconds` and plays `speed` times as fast.

        hold: the seconds that the end stays visible.
        """
        self.parts = parts
        self.seconds = seconds
        self.speed = speed
        self.period = seconds / speed + hold
        self.rules = [
            f"g{{animation:{self.period:.2f}s linear infinite}}",
            "@media(prefers-reduced-motion:reduce){g{animation:none!important}}",
        ]

    @contextmanager
    def moving(self, name: str, distance: float) -> Iterator[None]:
        """Move what is drawn inside to the right by `distance` pixels while the play lasts."""
        end = f"transform:translateX({distance:g}px)"
        self.rules += [
            f"#{name}{{animation-name:{name};{end}}}",
            f"@keyframes {name}{{0%{{transform:none}}{self._at(self.seconds)},to{{{end}}}}}",
        ]
        with self._group(name):
            yield

    @contextmanager
    def shown(self, name: str, start: float, end: float | None = None) -> Iterator[None]:
        """Show what is drawn inside from `start` to `end`, in seconds.

        end: None if it stays visible until the play starts again.
        """
        times = "0%{opacity:0}" if start > 0 else ""
        times += f"{self._at(start)}{{opacity:1}}"
        times += "to{opacity:1}" if end is None else f"{self._at(end)},to{{opacity:0}}"
        self.rules += [
            f"#{name}{{animation-name:{name};animation-timing-function:step-end;"
            f"opacity:{int(end is None)}}}",
            f"@keyframes {name}{{{times}}}",
        ]
        with self._group(name):
            yield

    @contextmanager
    def _group(self, name: str) -> Iterator[None]:
        self.parts.append(f'<g id="{name}">')
        yield
        self.parts.append("</g>")

    def _at(self, seconds: float) -> str:
        return f"{100 * seconds / self.speed / self.period:.2f}%"


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
