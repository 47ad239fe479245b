"""Draw bars and curves as SVG, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import svg

WIDTH, ROW, LABEL, VALUE, GAP = 720, 18, 120, 60, 34  # pixels
# Of curves. From the eighth curve on, they repeat.
COLOURS = 3 * ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#7a7a7a", "#56b4e9")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 }
.milestone { fill: #0072b2 } .peer { fill: #999999 }
.axis { fill: none; stroke: #8b949e } .curve { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .milestone { fill: #56b4e9 } .peer { fill: #8b949e }
}""" + "".join(
    f"\n.line{number} {{ stroke: {colour} }} .fill{number} {{ fill: {colour} }}"
    for number, colour in enumerate(COLOURS)
)
PANEL, HEIGHT, LEFT, TOP, BOTTOM = 240, 220, 50, 56, 30  # pixels of one panel
KEY = 110  # pixels from one name of the legend to the next


def bars(document: dict[str, Any]) -> str:
    """Draw the output tokens per second that a bench has measured: one group of bars for each
    workload, one bar for each engine."""
    engines, caption = document["engines"], document["machine"]
    parts, y = [svg.text(4, 16, f"{caption}: tokens/s", "title")], 24
    for name in dict.fromkeys(name for measured in engines.values() for name in measured):
        speeds = {
            engine: measured[name]["tokens_per_second"]
            for engine, measured in engines.items()
            if name in measured
        }
        most = max(speeds.values())
        parts.append(svg.text(4, y + 14, name, "title"))
        y += ROW + 2
        for engine, speed in speeds.items():
            width = (WIDTH - LABEL - VALUE) * speed / most
            kind = "milestone" if engine.startswith("m") else "peer"
            parts += [
                svg.text(LABEL - 8, y + 13, engine, anchor="end"),
                svg.rect(LABEL, y + 2, width, ROW - 4, kind),
                svg.text(LABEL + width + 6, y + 13, f"{speed:.1f}"),
            ]
            y += ROW
        y += GAP - ROW
    return svg.document(parts, WIDTH, y, STYLE)


Points = Sequence[tuple[float, float]]


def lines(panels: Mapping[str, Mapping[str, Points]], title: str) -> str:
    """Draw panels side by side: curves over sizes on a logarithmic axis.

    panels: for each name of a panel, the curves with their names. The curves of one name have the
    same colour in all panels. Values begin at 0. If the largest is more than thirty times the
    smallest, their axis is logarithmic too, and begins at the smallest.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    parts = [svg.text(4, 16, title, "title")]
    if len(names) > 1:
        for number, name in enumerate(names):
            parts += [
                svg.rect(LEFT + number * KEY, HEIGHT + 2, 14, 4, f"fill{number}"),
                svg.text(LEFT + number * KEY + 20, HEIGHT + 9, name),
            ]
    for number, (name, curves) in enumerate(panels.items()):
        parts += [svg.text(number * PANEL + LEFT, 40, name, "title")]
        numbered = {names.index(curve): points for curve, points in curves.items()}
        parts += _panel(number * PANEL, numbered)
    height = HEIGHT + (20 if len(names) > 1 else 0)
    return svg.document(parts, max(1, len(panels)) * PANEL, height, STYLE)


def _panel(x: float, curves: Mapping[int, Points]) -> list[str]:
    """Draw the axes and the curves of one panel. The keys are the numbers of the colours."""
    left, right, bottom = x + LEFT, x + PANEL - 24, HEIGHT - BOTTOM
    sizes = [size for points in curves.values() for size, _ in points]
    values = [value for points in curves.values() for _, value in points]
    across = _scale(min(sizes), max(sizes), left, right, is_logarithmic=True)
    wide = min(values) > 0 and max(values) > 30 * min(values)
    lowest = min(values) if wide else 0.0
    up = _scale(lowest, max(values), bottom, TOP, is_logarithmic=wide)
    parts = [
        svg.polyline([(left, TOP), (left, bottom), (right, bottom)], "axis"),
        svg.text(left - 4, TOP + 8, _number(max(values)), anchor="end"),
        svg.text(left - 4, bottom, _number(lowest), anchor="end"),
        svg.text(left, HEIGHT - 12, f"{min(sizes):,g}"),
        svg.text(right, HEIGHT - 12, f"{max(sizes):,g}", anchor="end"),
    ]
    for number, points in curves.items():
        places = [(across(size), up(value)) for size, value in points]
        parts.append(svg.polyline(places, f"curve line{number}"))
        parts += [svg.element("circle", kind=f"fill{number}", cx=x, cy=y, r=3) for x, y in places]
    return parts


def _scale(
    lowest: float, highest: float, start: float, end: float, *, is_logarithmic: bool
) -> Callable[[float], float]:
    """Return the function that maps a value to its place between `start` and `end`, in pixels."""
    measure: Callable[[float], float] = math.log2 if is_logarithmic else float
    span = max(1e-9, measure(highest) - measure(lowest))
    return lambda value: start + (end - start) * (measure(value) - measure(lowest)) / span


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
