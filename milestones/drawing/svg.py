"""Write SVG. All pictures of the project use these functions, each with its own style sheet."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

NAMES = {"kind": "class"}  # `class` is a word of Python


def element(tag: str, body: str = "", /, **attributes: object) -> str:
    """Return an element. `body` is SVG.

    Numbers are rounded to a tenth of a pixel, and a `_` in a name is a `-`. An attribute that is
    empty or None is left out.
    """
    shown = "".join(
        f' {NAMES.get(name, name.replace("_", "-"))}="{_written(value)}"'
        for name, value in attributes.items()
        if value not in (None, "")
    )
    return f"<{tag}{shown}>{body}</{tag}>" if body else f"<{tag}{shown}/>"


def text(
    x: float, y: float, words: str, kind: str = "", size: float | None = None, anchor: str = ""
) -> str:
    """Return a line of text on its baseline. anchor: start, middle or end."""
    body = escape(words, quote=False)
    return element("text", body, kind=kind, x=x, y=y, font_size=size, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, kind: str = "", **more: object) -> str:
    """Return a rectangle."""
    return element("rect", kind=kind, x=x, y=y, width=max(0, width), height=height, **more)


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "", **more: object) -> str:
    """Return a straight line."""
    return element("line", kind=kind, x1=x1, y1=y1, x2=x2, y2=y2, **more)


def path(d: str, kind: str = "", **more: object) -> str:
    """Return a path. Its commands are as in SVG."""
    return element("path", kind=kind, d=d, **more)


def polyline(places: Iterable[tuple[float, float]], kind: str = "") -> str:
    """Return a line through points."""
    return path("M" + " L".join(f"{_written(x)} {_written(y)}" for x, y in places), kind)


def document(parts: list[str], width: float, height: float, style: str, title: str = "") -> str:
    """Return the text of a file. `title` describes the picture in words, for screen readers."""
    head = element("title", escape(title)) if title else ""
    body = "\n".join([f"{head}<style>{style}</style>", *parts, ""])
    root = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}"}
    return element("svg", body, **root, role="img") + "\n"


def _written(value: object) -> str:
    if isinstance(value, (int, float)):
        return f"{round(value, 1) + 0:.6g}"
    return escape(str(value))
