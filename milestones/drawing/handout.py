"""The style of the handouts' pictures, and the shapes that several of them have.

The pictures are for light and dark backgrounds. People with any colour vision can distinguish the
colours (Okabe and Ito, 2008).
"""

from __future__ import annotations

from . import svg

COLORS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00")
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#24292f}.t{font-size:14px;font-weight:600}"
    ".p{fill:#fff}line{stroke:#d0d7de}.l{fill-opacity:.3}.m{stroke:#24292f;stroke-width:1.5}"
    + "".join(f".c{i}{{fill:{color}}}" for i, color in enumerate(COLORS))
    + "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.p{fill:#0d1117}"
    "line{stroke:#30363d}.m{stroke:#e6edf3}}"
)


def document(parts: list[str], width: float, height: float, title: str, rules: str = "") -> str:
    """Return the text of a file: the parts on the background, below a title.

    rules: CSS of this picture alone.
    """
    ground = [svg.rect(0, 0, width, height, "p"), svg.text(12, 20, title, "t")]
    return svg.document([*ground, *parts], width, height, STYLE + rules, title)


def kind(color: int, *, light: bool = False) -> str:
    """Return the CSS classes of a colour, or of its pale form."""
    return f"c{color % len(COLORS)}{' l' * light}"


def staircase(x: float, bottom: float, width: float, heights: list[float], color: int) -> str:
    """Return a staircase above `bottom`. Each step is `width` wide."""
    path, last, run = f"M{x:g} {bottom:g}", 0.0, 0.0
    for height in heights:
        if round(height, 1) != round(last, 1):
            path += (f"h{run:g}" if run else "") + f"V{bottom - height:.4g}"
            run, last = 0.0, height
        run += width
    return svg.path(f"{path}h{run:g}V{bottom:g}z", kind(color))


def axis(x: float, y: float, width: float, count: int, *, every: int) -> list[str]:
    """Return the numbers of the steps below a picture, starting with 1."""
    numbers = [
        svg.text(x + (step + 0.5) * width, y + 14, f"{step + 1}", anchor="middle")
        for step in range(0, count, every)
    ]
    end = x + count * width
    return [svg.line(x, y, end, y), *numbers, svg.text(end, y + 28, "step", anchor="end")]


def legend(x: float, y: float, entries: list[tuple[int, bool, str]]) -> list[str]:
    """Return a legend. An entry has a colour, whether it is the pale form, and its meaning."""
    parts = []
    for color, light, words in entries:
        parts.append(svg.rect(x, y - 9, 10, 10, kind(color, light=light)))
        parts.append(svg.text(x + 15, y, words, anchor="start"))
        x += 40 + 6 * len(words)
    return parts
