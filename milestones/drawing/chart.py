"""Draw bars and curves as SVG, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import svg, theme

Json = dict[str, Any]
WIDTH, ROW, LABEL, VALUE, GAP = 720, 18, 120, 60, 34  # pixels
# The colours of curves: of m1 to m5, if there are five. From the eighth curve on, they repeat.
KINDS = ("hot", "prompt", "plan", "cached", "forward", "output", "work")
RULES = (
    ".title{font-weight:600}.axis{fill:none;stroke:var(--soft)}.curve{fill:none;stroke-width:2}"
) + "".join(f".{kind}-line{{stroke:var(--{kind})}}" for kind in KINDS)
PANEL, HEIGHT, LEFT, TOP, BOTTOM = 240, 220, 50, 56, 30  # pixels of one panel
KEY = 110  # pixels from one name of the legend to the next


def bars(document: Json) -> str:
    """Draw the output tokens per second that a bench has measured: one group of bars for each
    workload, one bar for each engine."""
    engines, caption = document["engines"], document["machine"]
    title = f"{caption}: tokens/s"
    parts, y = [svg.text(8, 20, title, "title")], 28
    for name in dict.fromkeys(name for measured in engines.values() for name in measured):
        speeds = {
            engine: measured[name]["tokens_per_second"]
            for engine, measured in engines.items()
            if name in measured
        }
        most = max(speeds.values())
        parts.append(svg.text(8, y + 14, name, "title"))
        y += ROW + 2
        for engine, speed in speeds.items():
            width = (WIDTH - LABEL - VALUE) * speed / most
            kind = "forward" if engine.startswith("m") else "soft"
            parts += [
                svg.text(LABEL - 8, y + 13, engine, anchor="end"),
                svg.rect(LABEL, y + 2, width, ROW - 4, kind),
                svg.text(LABEL + width + 6, y + 13, f"{speed:.1f}"),
            ]
            y += ROW
        y += GAP - ROW
    return theme.document(parts, WIDTH, y, title, RULES)


Points = Sequence[tuple[float, float]]


def load(document: Json) -> str:
    """Draw p95 latencies and goodput against the rate: one curve for each server.

    document: of a run of `load`, as the file of `--json` has it.
    """
    figures: dict[str, Callable[[Json], float | None]] = {
        "TTFT p95, ms": lambda row: row["first_ms"] and row["first_ms"]["95"],
        "ITL p95, ms": lambda row: row["gap_ms"] and row["gap_ms"]["95"],
        "goodput, requests/s": lambda row: row["goodput"],
    }
    runs = document.get("engines") or {"server": document["rows"]}
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, figure in figures.items():
        for server, rows in runs.items():
            points = [(row["rate"], value) for row in rows if (value := figure(row)) is not None]
            if points:
                panels.setdefault(name, {})[server] = points
    return lines(panels, f"{document['model']}, {document['machine']}")


def lines(panels: Mapping[str, Mapping[str, Points]], title: str) -> str:
    """Draw panels side by side: curves over sizes on a logarithmic axis.

    panels: for each name of a panel, the curves with their names. The curves of one name have the
    same colour in all panels. Values begin at 0. If the largest is more than thirty times the
    smallest, their axis is logarithmic too, and begins at the smallest.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    kinds = {
        name: KINDS[number % len(KINDS)] if len(names) > 1 else "forward"
        for number, name in enumerate(names)
    }
    parts = [svg.text(8, 20, title, "title")]
    if len(names) > 1:
        for number, (name, kind) in enumerate(kinds.items()):
            parts += [
                svg.rect(LEFT + number * KEY, HEIGHT + 2, 14, 4, kind),
                svg.text(LEFT + number * KEY + 20, HEIGHT + 9, name),
            ]
    for number, (name, curves) in enumerate(panels.items()):
        parts += [svg.text(number * PANEL + LEFT, 44, name, "title")]
        parts += _panel(number * PANEL, [(kinds[curve], curves[curve]) for curve in curves])
    height = HEIGHT + (20 if len(names) > 1 else 0)
    return theme.document(parts, max(1, len(panels)) * PANEL, height, title, RULES)


def _panel(x: float, curves: Sequence[tuple[str, Points]]) -> list[str]:
    """Draw the axes and the curves of one panel, each curve with its colour."""
    left, right, bottom = x + LEFT, x + PANEL - 24, HEIGHT - BOTTOM
    sizes = [size for _, points in curves for size, _ in points]
    values = [value for _, points in curves for _, value in points]
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
    for kind, points in curves:
        places = [(across(size), up(value)) for size, value in points]
        parts.append(svg.polyline(places, f"curve {kind}-line"))
        parts += [svg.element("circle", kind=kind, cx=x, cy=y, r=3) for x, y in places]
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
