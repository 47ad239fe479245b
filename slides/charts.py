"""Charts of numbers: bars, a roofline, growing lines, the two lanes of a timeline."""

from __future__ import annotations

import math
import re
from html import escape
from itertools import pairwise
from typing import Any

from milestones.drawing.chart import KINDS
from milestones.drawing.lanes import Span, lane
from milestones.drawing.svg import line, polyline, text

from .facts import data, value
from .svg import NUMBER, WIDTH, hue, labelled, picture, rect, text_width

SPAN = re.compile(r"(\d+)-(\d+) (\w+)(?:=([^\s,]+))?")  # of `gantt`


def bars(
    body: str, form: str = ".1f", unit: str = "", height: str = "44", width: str = "1160"
) -> str:
    """Draw one bar for each line of the body: `label = expression [= class]`.

    A bar of several parts is `label = expression = class = expression = class`, and so on.
    """
    entries = [
        [part.strip() for part in row.split(" = ")] for row in body.splitlines() if row.strip()
    ]
    stacks = [[float(value(part)) for part in entry[1::2]] for entry in entries]
    left = max(text_width(entry[0], 22) for entry in entries) + 24
    step, most = float(height), max(map(sum, stacks))
    scale = (float(width) - left - 150) / most
    parts, labels = list[str](), list[str]()
    for row, (entry, numbers) in enumerate(zip(entries, stacks, strict=True)):
        y, end, total = row * step, left, f"{sum(numbers):{form}} {unit}".strip()
        for number, kind in zip(numbers, [*entry[2::2], "forward"], strict=False):
            box = (end, y + 6, max(2, number * scale), step - 14)
            words = f"{number:{form}}" if len(numbers) > 1 else ""
            parts += labelled(*box, words, kind, "light strong", 22, 3)
            end += number * scale
        parts.append(text(left - 14, y + step / 2 + 5, entry[0], "", 22, "end"))
        parts.append(text(end + 12, y + step / 2 + 5, total, "strong", 22))
        labels.append(f"{entry[0]}: {total}")
    return picture(float(width), len(entries) * step, parts, "; ".join(labels))


def keys(body: str) -> str:
    """Explain the colours of the figure above. Each line of the body is `class: words`."""
    parts = []
    for row in filter(None, map(str.strip, body.splitlines())):
        kind, _, words = row.partition(": ")
        swatch = rect(1, 1, 24, 16, kind, 3, "--hue: 220" if kind == "chip" else "")
        drawing = f'<svg class="picture" viewBox="0 0 26 18" aria-hidden="true">{swatch}</svg>'
        parts.append(f"<span>{drawing}{escape(words)}</span>")
    return f'<div class="keys">{"".join(parts)}</div>'


def gantt(body: str, height: str = "40", width: str = f"{WIDTH}") -> str:
    """Draw spans on a common scale of time, steps or tokens.

    A line is `name: 0-20 output=A, 20-24 stall`. A line `# words` is a heading. A class that is a
    capital letter is the colour of that request.
    """
    parts, y, step = list[str](), 0.0, float(height)
    names = re.findall(r"^([^#:\n]+):", body, re.MULTILINE)
    left = max(110.0, *(text_width(name, 22) + 16 for name in names), 0.0) if names else 0.0
    scale = (float(width) - left) / max(int(end) for _, end, *_ in SPAN.findall(body))
    for row in filter(None, map(str.strip, body.splitlines())):
        if row.startswith("#"):
            parts.append(text(0, y + 26, row.lstrip("# "), "strong", 23))
            y += 38
            continue
        name, _, spans = row.partition(": ")
        parts.append(text(0, y + step / 2 + 5, name, "", 22))
        parts += (
            part for start, end, kind, words in SPAN.findall(spans)
            for part in labelled(
                left + int(start) * scale, y + 3, max(2, (int(end) - int(start)) * scale - 1),
                step - 8, words.replace("_", " "), "chip" if kind in NUMBER else kind, _ink(kind),
                radius=3, style=hue(NUMBER[kind]) if kind in NUMBER else "",
            )
        )  # fmt: skip
        y += step
    return picture(float(width), y, parts, " ".join(body.split()))


def _ink(kind: str) -> str:
    if kind in NUMBER:
        return "chip-ink strong"
    if kind in ("output", "computed"):
        return "on strong"
    return "strong" if kind in ("idle", "stall", "padding", "frame", "cached") else "light strong"


class Axes:
    """A plot: axes with ticks, and a scale that turns values into places."""

    def __init__(
        self, xs: list[float], ys: list[float], x_name: str, y_name: str, height: float = 500
    ) -> None:
        self.left, self.top, self.right, self.bottom = 76.0, 16.0, 980.0, height - 58
        self.x_max, self.y_max, self.height = xs[-1], ys[-1], height
        self.names = list[tuple[float, float, str, str]]()  # x, y, words, ink of each curve
        self.parts = [line(self.left, self.bottom, self.right, self.bottom)]
        for x in xs:
            self.parts.append(text(self.x(x), self.bottom + 26, f"{x:g}", "soft", 21, "middle"))
        for y in ys:
            self.parts.append(line(self.left, self.y(y), self.right, self.y(y), "grid"))
            self.parts.append(text(self.left - 10, self.y(y) + 6, f"{y:g}", "soft", 21, "end"))
        self.parts.append(text(self.right, self.bottom + 50, x_name, "", 22, "end"))
        self.parts.append(text(self.left + 8, self.top + 8, y_name, "", 22))

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / self.x_max

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top - 10) * value / self.y_max

    def curve(
        self, xs: list[float], ys: list[float], kind: str, name: str, dots: bool = True
    ) -> None:
        """Draw a line through points, with its name at the end or below another name."""
        points = [(self.x(a), self.y(b)) for a, b in zip(xs, ys, strict=True)]
        self.parts.append(polyline(points, f"curve {kind}-line"))
        if dots:
            for a, b in points:
                shape = rect(a - 5, b - 5, 10, 10, kind, 5 if kind != "forward" else 0)
                self.parts.append(shape)
        x, y = points[-1]
        self.names.append((x + 12, y + 6, name, f"{kind}-ink strong"))

    def picture(self, label: str) -> str:
        free = 0.0  # the next name must not be higher than this
        for x, y, name, ink in sorted(self.names, key=lambda name: name[1]):
            self.parts.append(text(x, max(y, free), name, ink, 22))
            free = max(y, free) + 26
        return picture(WIDTH, self.height, self.parts, label)


def growth(name: str = "m1_growth") -> str:
    """Draw the milliseconds for the next token by context, with the cache and without."""
    run: dict[str, Any] = data(name)
    top = 100.0 * -(-max(run["recompute_ms"]) // 100)
    axes = Axes(
        [0, *run["contexts"]][-4:],
        [0, top / 2, top],
        "tokens of context",
        "ms for the next token",
        370,
    )
    axes.curve(run["contexts"], run["recompute_ms"], "hot", "recompute")
    axes.curve(run["contexts"], run["cached_ms"], "cached", "with the cache")
    return axes.picture("Time for the next token: flat with the cache, growing without")


def roofline(name: str) -> str:
    """Draw the milliseconds of all linear layers by rows, with the two roofs of the machine."""
    run: dict[str, Any] = data(name)
    rows, floor = run["rows"], run["weights_gb"] / run["bytes_per_second"] * 1e12
    slope = run["gflop_per_row"] / run["flops_per_second"] * 1e12
    step = 25 if max(run["ms"]) <= 100 else 50
    ticks = [float(step * i) for i in range(math.ceil(max(run["ms"]) / step) + 1)]
    axes = Axes([0, 8, 16, 32, 48], ticks, "rows in one forward", "ms")
    axes.curve([0, 48], [floor, floor], "plan", "read the weights", dots=False)
    axes.curve([0, 48], [0, 48 * slope], "prompt", "arithmetic", dots=False)
    axes.curve(rows, run["ms"], "forward", "measured")
    return axes.picture("A forward's time by rows: flat until the arithmetic takes over")


def goodput(name: str = "load") -> str:
    """Draw the goodput of each milestone by the rate of arrivals, with its name at the best one."""
    engines: dict[str, list[dict[str, Any]]] = data(name)["engines"]
    rates = sorted({point["rate"] for points in engines.values() for point in points})
    top = math.ceil(max(point["goodput"] for points in engines.values() for point in points))
    axes = Axes(
        [0, *rates], [float(y) for y in range(top + 1)], "requests per second",
        "answers per second within the limits", 400,
    )  # fmt: skip
    axes.parts.append(line(axes.x(0), axes.y(0), axes.x(top), axes.y(top), "grid"))
    for (engine, points), kind in zip(engines.items(), KINDS, strict=False):
        axes.curve([p["rate"] for p in points], [p["goodput"] for p in points], kind, "")
        best = max(points, key=lambda point: point["goodput"])
        x, y, ink = axes.x(best["rate"]), axes.y(best["goodput"]), f"{kind}-ink strong"
        falls = best is points[0]  # the curve goes to the right from here, so the name is left
        axes.parts.append(
            text(x - 14, y + 7, engine, ink, 22, "end") if falls
            else text(x + 14, y - 4, engine, ink, 22)
        )  # fmt: skip
    return axes.picture("Answers within the limits by rate: each milestone breaks down at its own")


def lanes(name: str, loop: str) -> str:
    """Draw the host lane and the forward lane of some steps. All loops of a record have one scale.

    So a loop that needs less time ends earlier.
    """
    run = data(name)[loop]
    forwards, end = run["forward"], run["forward"][-1]["end"]
    loops = [loop for loop in data(name).values() if "forward" in loop]
    longest = max(loop["forward"][-1]["end"] for loop in loops)
    scale = (WIDTH - 110) / longest
    host = [Span(max(0, s["start"]), min(end, s["end"]), s["name"]) for s in run["host"]]
    gaps = [
        Span(before["end"], after["start"], "stall")
        for before, after in pairwise(forwards)
        if (after["start"] - before["end"]) * scale > 1.5
    ]
    busy = [Span(s["start"], s["end"], "forward", f"{s['step']}", "light strong") for s in forwards]
    parts = [text(0, 50, "host", "", 21), text(0, 122, "forward", "", 21)]
    parts += lane(110, 12, 58, scale, host, 20, 2)
    parts += lane(110, 84, 58, scale, [*gaps, *busy], 20, 2)
    parts.append(line(110, 160, WIDTH, 160))
    if (longest - end) * scale > 140:  # there is room for the words
        saved, x = f"{longest - end:.1f} ms saved", 110 + (end + longest) / 2 * scale
        parts.append(text(x, 122, saved, "soft", 21, "middle"))
    for ms in range(0, int(longest) + 1, 5 if longest < 40 else 10):
        parts.append(text(110 + ms * scale, 186, f"{ms} ms", "soft", 20, "middle"))
    return picture(WIDTH, 194, parts, f"Host and forward lanes, {loop}: busy {run['busy']:.1%}")
