"""Draw bars and curves as SVG, for light and dark backgrounds."""

from __future__ import annotations

import math
from html import escape
from typing import Any

WIDTH, ROW, LABEL, VALUE, GAP = 720, 18, 120, 60, 34  # pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 }
.milestone { fill: #0072b2 } .peer { fill: #999999 }
.axis { stroke: #8b949e } .curve { fill: none; stroke: #0072b2; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .milestone { fill: #56b4e9 } .peer { fill: #8b949e }
  .curve { stroke: #56b4e9 }
}"""
PANEL, HEIGHT, LEFT, TOP, BOTTOM = 240, 220, 50, 56, 30  # pixels of one curve


def bars(document: dict[str, Any]) -> str:
    """Draw the output tokens per second that a bench has measured: one group of bars for each
    workload, one bar for each engine."""
    engines, caption = document["engines"], document["machine"]
    parts, y = [f'<text class="title" x="4" y="16">{escape(caption)}: tokens/s</text>'], 24
    for name in dict.fromkeys(name for measured in engines.values() for name in measured):
        speeds = {
            engine: measured[name]["tokens_per_second"]
            for engine, measured in engines.items()
            if name in measured
        }
        most = max(speeds.values())
        parts.append(f'<text class="title" x="4" y="{y + 14}">{escape(name)}</text>')
        y += ROW + 2
        for engine, speed in speeds.items():
            width = (WIDTH - LABEL - VALUE) * speed / most
            kind = "milestone" if engine.startswith("m") else "peer"
            parts += [
                f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(engine)}</text>',
                f'<rect class="{kind}" x="{LABEL}" y="{y + 2}" width="{width:.1f}" '
                f'height="{ROW - 4}"/>',
                f'<text x="{LABEL + width + 6:.1f}" y="{y + 13}">{speed:.1f}</text>',
            ]
            y += ROW
        y += GAP - ROW
    return _document(parts, WIDTH, y)


def lines(curves: dict[str, list[tuple[int, float]]], caption: str) -> str:
    """Draw a panel for each curve: milliseconds from 0 up, over sizes on a logarithmic axis."""
    parts = [f'<text class="title" x="4" y="16">{escape(caption)}: ms per step</text>']
    for number, (name, points) in enumerate(curves.items()):
        left = number * PANEL + LEFT
        right, bottom = (number + 1) * PANEL - 24, HEIGHT - BOTTOM
        least, most = math.log2(points[0][0]), math.log2(points[-1][0])
        highest = max(milliseconds for _, milliseconds in points)
        places = [
            (
                left + (right - left) * (math.log2(size) - least) / max(1e-9, most - least),
                bottom - (bottom - TOP) * milliseconds / highest,
            )
            for size, milliseconds in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts += [
            f'<text class="title" x="{left}" y="40">{escape(name)}</text>',
            f'<path class="axis" fill="none" d="M{left} {TOP}V{bottom}H{right}"/>',
            f'<text x="{left - 4}" y="{TOP + 8}" text-anchor="end">{highest:.3g}</text>',
            f'<text x="{left - 4}" y="{bottom}" text-anchor="end">0</text>',
            f'<text x="{left}" y="{HEIGHT - 12}">{points[0][0]:,}</text>',
            f'<text x="{right}" y="{HEIGHT - 12}" text-anchor="end">{points[-1][0]:,}</text>',
            f'<polyline class="curve" points="{path}"/>',
            *(f'<circle class="milestone" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places),
        ]
    return _document(parts, len(curves) * PANEL, HEIGHT)


def _document(parts: list[str], width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )
