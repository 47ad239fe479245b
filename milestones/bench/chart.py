"""Draw bars and curves as SVG, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import svg

WIDTH, ROW, LABEL, VALUE, GAP = 720, 18, 120, 60, 34  # pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 }
.milestone { fill: #0072b2 } .peer { fill: #999999 }
.axis { fill: none; stroke: #8b949e } .curve { fill: none; stroke: #0072b2; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .milestone { fill: #56b4e9 } .peer { fill: #8b949e }
  .curve { stroke: #56b4e9 }
}"""
PANEL, HEIGHT, LEFT, TOP, BOTTOM = 240, 220, 50, 56, 30  # pixels of one curve


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


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """Draw a panel for each curve: values from 0 up, over sizes on a logarithmic axis."""
    parts = [svg.text(4, 16, title, "title")]
    for number, (name, points) in enumerate(curves.items()):
        left = number * PANEL + LEFT
        right, bottom = (number + 1) * PANEL - 24, HEIGHT - BOTTOM
        least, most = math.log2(points[0][0]), math.log2(points[-1][0])
        highest = max(value for _, value in points)
        places = [
            (
                left + (right - left) * (math.log2(size) - least) / max(1e-9, most - least),
                bottom - (bottom - TOP) * value / max(1e-9, highest),
            )
            for size, value in points
        ]
        parts += [
            svg.text(left, 40, name, "title"),
            svg.path(f"M{left} {TOP}V{bottom}H{right}", "axis"),
            svg.text(left - 4, TOP + 8, f"{highest:.3g}", anchor="end"),
            svg.text(left - 4, bottom, "0", anchor="end"),
            svg.text(left, HEIGHT - 12, f"{points[0][0]:,g}"),
            svg.text(right, HEIGHT - 12, f"{points[-1][0]:,g}", anchor="end"),
            svg.path(svg.points(places), "curve"),
            *(svg.element("circle", kind="milestone", cx=x, cy=y, r=3) for x, y in places),
        ]
    return svg.document(parts, len(curves) * PANEL, HEIGHT, STYLE)
