"""Draw the picture of the README: the same requests on all milestones, on one time axis.

    python -m milestones.staff.maintain.figures_ladder            # draw ladder.svg again
    python -m milestones.staff.maintain.figures_ladder --record   # run the milestones first

The picture shows the end of the runs. Then it plays them in real time: a second of it is a second
of the recorded run. A run that is longer than `LONGEST` plays faster, and the note below says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import ceil

from ...chain import ROOT, short
from ...drawing import handout, svg
from . import ladder_runs
from .ladder_runs import Lane, Recording

FILE = ROOT / "milestones" / "docs" / "ladder.svg"
LESSONS = {
    "m1_single": "One request at a time; the others wait.",
    "m2_continuous": "All requests in one batch; a new prompt pauses the others.",
    "m3_paged": "Prompts in chunks, next to the others' tokens.",
    "m4_radix": "The shared system prompt is computed only once.",
    "m5_overlap": "The CPU plans the next step during the current one.",
}
PREFILL, DECODE = "prompt", "output"  # colours
LEFT, FIELD, RIGHT, TOP = 12, 568, 60, 62  # pixels: the lanes and their margins
WORDS, COUNT = 128, 572  # pixels: where the lesson of a lane begins, and where its count ends
HEAD, BAR, ROW, GAP = 22, 5, 6, 10  # pixels: words over a lane, a bar, a row, and space below
BEFORE, AFTER = 3.0, 2.0  # seconds that the end of the runs stays visible, before and after them
JUMP = 0.02  # seconds in which the picture goes back to the beginning
LONGEST = 15.0  # seconds that the picture plays
RULES = ".b{font-size:13px;font-weight:600}.s{font-size:11px}"
NARROW = 0.5  # pixels: a shorter bar could not be seen
NUMBERS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


def result(recording: Recording) -> str:
    """Return what the picture shows, in words."""
    first, *_, last = recording.lanes
    count = NUMBERS[len(recording.arrivals)]
    first_s, last_s = recording.lanes[first].seconds, recording.lanes[last].seconds
    return (
        f"{count} chats, the same answers: {first_s:.1f} s on {short(first)}, "
        f"{last_s:.1f} s on {short(last)}"
    )


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
        lane_height = HEAD + len(recording.arrivals) * ROW + GAP
        self.tops = [TOP + HEAD + number * lane_height for number in range(len(recording.lanes))]
        self.bottom = TOP + lane_height * len(recording.lanes)
        self.parts: list[str] = []
        self.player = Player(self.parts, self.seconds, self.speed)

    def text(self) -> str:
        """Return the file."""
        rules = "".join([RULES, *self.player.rules])
        width, height = LEFT + FIELD + RIGHT, self.bottom + 58
        return handout.document(self.parts, width, height, result(self.recording), rules)

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
                self.parts.append(svg.rect(start, y, width, BAR, PREFILL if is_prefill else DECODE))

    def draw_cover(self) -> None:
        """Hide the future: the cover and the line at its left edge move to the right."""
        with self.player.moving("cover", FIELD):
            self.parts += [svg.rect(LEFT, TOP, FIELD + RIGHT, self.bottom - TOP, "p"),
                           svg.line(LEFT, TOP, LEFT, self.bottom, "m")]  # fmt: skip

    def draw_words(self, top: float, milestone: str, lane: Lane) -> None:
        """Write the name and the lesson of a lane, the number of requests done, and the time."""
        self._words(LEFT, top - 7, milestone, "b")
        self._words(WORDS, top - 7, LESSONS[milestone])
        name, count = short(milestone), len(lane.ends)
        times = [0.0, *sorted(lane.ends)]
        for done, (start, end) in enumerate([*pairwise(times), (times[-1], None)]):
            if start != end:
                with self.player.shown(f"{name}-{done}", start, end):
                    self._words(COUNT, top - 7, f"{done} of {count} done", anchor="end")
        with self.player.shown(f"{name}-s", lane.seconds):
            y = top + count * ROW / 2 + 4
            self._words(self._x(lane.seconds) + 8, y, f"{lane.seconds:.1f} s", "t")

    def draw_axis(self) -> None:
        """Draw the seconds, the legend, and where and how this was recorded."""
        self.parts += handout.legend(
            LEFT, 45, [(PREFILL, "prompt tokens are computed"),
                       (DECODE, "output tokens are computed")],
        )  # fmt: skip
        self._line(422, 40, 444)
        self._words(450, 45, "the request waits")
        self._line(LEFT, self.bottom, LEFT + FIELD)
        for second in range(0, ceil(self.seconds), self.speed):
            anchor = "middle" if second else "start"
            self._words(self._x(second), self.bottom + 15, f"{second} s", anchor=anchor)
        for number, line in enumerate(self._note()):
            self._words(LEFT, self.bottom + 34 + 14 * number, line, "s")

    def _line(self, x: float, y: float, end: float) -> None:
        self.parts.append(svg.line(x, y, end, y, "rule"))

    def _words(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(svg.text(x, y, words, kind, anchor=anchor))

    def _x(self, second: float) -> float:
        return round(LEFT + second * self.scale, 1)

    def _note(self) -> tuple[str, str]:
        """Return two lines."""
        prompts = next(iter(self.recording.lanes.values())).prompt_tokens
        first, second = self.recording.arrivals[:2]
        pace = "in real time" if self.speed == 1 else f"{self.speed} times as fast as it was"
        return (
            f"One chat every {second - first:g} s, prompts of {min(prompts)} to {max(prompts)} "
            f"tokens. The picture plays {pace}.",
            f"{self.recording.model} in float32, {self.recording.machine}.",
        )


class Player:
    """Plays a drawing over time: it moves and shows shapes by CSS, again and again.

    `rules` is its CSS. The drawing shows its end first. It stays there in a program that cannot
    animate, and on a system with the setting "reduce motion".
    """

    def __init__(self, parts: list[str], seconds: float, speed: float = 1) -> None:
        """Times are those of the run, which takes `seconds` and plays `speed` times as fast."""
        self.parts = parts
        self.seconds = seconds
        self.speed = speed
        self.period = BEFORE + seconds / speed + AFTER
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
            f"@keyframes {name}{{0%,{self._at(-JUMP)}{{{end}}}{self._at(0)}{{transform:none}}"
            f"{self._at(self.seconds)},to{{{end}}}}}",
        ]
        with self._group(name):
            yield

    @contextmanager
    def shown(self, name: str, start: float, end: float | None = None) -> Iterator[None]:
        """Show what is drawn inside from `start` to `end`, in seconds.

        end: None if it stays visible until the play starts again.
        """
        times = f"0%{{opacity:{int(end is None)}}}"
        times += f"{self._at(0)}{{opacity:0}}" if start > 0 else ""
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
        return f"{100 * (BEFORE + seconds / self.speed) / self.period:.2f}%"


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
