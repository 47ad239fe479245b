"""Bars as SVG, light and dark."""

from __future__ import annotations

from html import escape

from .contenders import Contender

WIDTH, ROW, LABEL, VALUE, GAP = 720, 18, 120, 60, 34  # pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 }
.rung { fill: #0072b2 } .peer { fill: #999999 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .rung { fill: #56b4e9 } .peer { fill: #8b949e }
}"""


def bars(names: list[str], measured: list[Contender], caption: str) -> str:
    """Output tokens a second: a group for each workload, a bar for each engine in it."""
    parts, y = [f'<text class="title" x="4" y="16">{escape(caption)}: tokens/s</text>'], 24
    for name in names:
        summaries = [(c.name, s) for c in measured if (s := c.summary(name)) is not None]
        most = max(summary.tokens_per_second for _, summary in summaries)
        parts.append(f'<text class="title" x="4" y="{y + 14}">{escape(name)}</text>')
        y += ROW + 2
        for engine, summary in summaries:
            width = (WIDTH - LABEL - VALUE) * summary.tokens_per_second / most
            kind = "rung" if engine.startswith("m") else "peer"
            parts += [
                f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(engine)}</text>',
                f'<rect class="{kind}" x="{LABEL}" y="{y + 2}" width="{width:.1f}" '
                f'height="{ROW - 4}"/>',
                f'<text x="{LABEL + width + 6:.1f}" y="{y + 13}">'
                f"{summary.tokens_per_second:.1f}</text>",
            ]
            y += ROW
        y += GAP - ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )
