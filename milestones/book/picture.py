"""What the pictures of the figures share: their frame, and the colours of the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..drawing import svg

NAMES = "ABCDEFGH"


def frame(parts: Iterable[str], width: float, height: float, words: str) -> str:
    """Return an SVG as it stands in a page. words: what it shows, for screen readers."""
    return svg.element(
        "svg", "".join(parts), viewBox=f"0 0 {width:g} {height:g}", width=width, height=height,
        role="img", aria_label=words,
    )  # fmt: skip


def of_request(name: str) -> str:
    """Return the class of a request's colour: that of the player, too."""
    return f"request{NAMES.index(name)}"


def legend(x: float, y: float, entries: Mapping[str, str]) -> list[str]:
    """Return a legend in one line. entries: the class of a colour, and its meaning."""
    parts = list[str]()
    for kind, words in entries.items():
        parts.append(svg.rect(x, y - 10, 12, 12, kind, rx=2))
        parts.append(svg.text(x + 17, y, words))
        x += 34 + 6.6 * len(words)
    return parts
