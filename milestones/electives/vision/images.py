"""The images of a prompt, and which tokens they are. Plain Python data.

prompt     S  !  !  !  !  !  !  E  w  h  a  t        S, E: marks; !: a token of the image
index      0  1  2  3  4  5  6  7  8  9 ...
span          start             end
row           0  1  2  3  4  5                       of the image's embeddings
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .mrope import Axes, mrope_positions

if TYPE_CHECKING:
    from common.hf.image_processor import ImageSpan, ProcessedImage


class ImagePart(NamedTuple):
    """Rows [first, last) of an image's embeddings, for the tokens of a chunk from `place` on."""

    place: int
    image: ProcessedImage
    first: int
    last: int


class PromptImages:
    """The images of one prompt, and the positions of its tokens."""

    def __init__(self, num_tokens: int, spans: Sequence[ImageSpan]) -> None:
        """num_tokens: of the prompt. spans: in order; at least one."""
        self.spans = tuple(spans)
        self.num_tokens = num_tokens
        self._axes, self._delta = mrope_positions(num_tokens, spans)

    def positions(self, start: int, end: int) -> Axes:
        """Return the positions of the request's tokens [start, end), on three axes.

        Tokens after the prompt have the same position on all axes.
        """
        known = max(start, min(end, self.num_tokens))
        rest = range(known + self._delta, end + self._delta)
        time, height, width = ([*axis[start:known], *rest] for axis in self._axes)
        return time, height, width

    def parts(self, start: int, end: int) -> Iterator[ImagePart]:
        """Yield the parts of images in the request's tokens [start, end).

        The place of a part counts from `start`.
        """
        for span in self.spans:
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                yield ImagePart(first - start, span.image, first - span.start, last - span.start)
