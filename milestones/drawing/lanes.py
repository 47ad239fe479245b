"""Draw spans of time in lanes, all lanes on one scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import svg


class Span(NamedTuple):
    """A span of a lane: the class of its box, and the words in it with their class."""

    start: float
    end: float
    kind: str
    words: str = ""
    ink: str = ""


def lane(
    x: float, y: float, height: float, scale: float, spans: Iterable[Span], size: float = 12,
    radius: float | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield the boxes of a lane. Time 0 is at `x`, and a unit of time has `scale` pixels.

    size, radius: of the letters and of the corners, in pixels.
    """
    for start, end, kind, words, ink in spans:
        left, width = x + start * scale, max(2, (end - start) * scale - 1)
        yield svg.rect(left, y, width, height, kind, rx=radius)
        if words:
            middle = y + height / 2 + 0.35 * size
            yield svg.text(left + width / 2, middle, words, ink, size, "middle")
