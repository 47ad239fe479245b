"""The shapes that several pictures of the handouts have."""

from __future__ import annotations

from . import svg, theme


def document(parts: list[str], width: float, height: float, title: str, rules: str = "") -> str:
    """Return the text of a file: the parts on the background, below a title.

    rules: CSS of this picture alone.
    """
    return theme.document([svg.text(12, 22, title, "t"), *parts], width, height, title, rules)


def staircase(x: float, bottom: float, width: float, heights: list[float], kind: str) -> str:
    """Return a staircase above `bottom`. Each step is `width` wide."""
    path, last, run = f"M{x:g} {bottom:g}", 0.0, 0.0
    for height in heights:
        if round(height, 1) != round(last, 1):
            path += (f"h{run:g}" if run else "") + f"V{bottom - height:.4g}"
            run, last = 0.0, height
        run += width
    return svg.path(f"{path}h{run:g}V{bottom:g}z", kind)


def axis(x: float, y: float, width: float, count: int, *, every: int) -> list[str]:
    """Return the numbers of the steps below a picture, starting with 1."""
    numbers = [
        svg.text(x + (step + 0.5) * width, y + 15, f"{step + 1}", anchor="middle")
        for step in range(0, count, every)
    ]
    end = x + count * width
    return [svg.line(x, y, end, y), *numbers, svg.text(end, y + 30, "step", anchor="end")]


def legend(x: float, y: float, entries: list[tuple[str, str]]) -> list[str]:
    """Return a legend. An entry has the classes of a colour, and its meaning."""
    parts = []
    for kind, words in entries:
        parts.append(svg.rect(x, y - 10, 11, 11, kind))
        parts.append(svg.text(x + 16, y, words))
        x += 40 + 6.2 * len(words)
    return parts
