"""M-RoPE: positions on three axes, for time, height and width (Qwen2-VL). Plain Python data.

A token of text has the same position on all axes. The tokens of an image have one time, and their
row and column are counted from it. The text after an image goes on after its longer side:

    tokens    a  b | an image of 2 rows and 3 columns | c  d
    time      0  1 | 2  2  2  2  2  2                 | 5  6
    height    0  1 | 2  2  2  3  3  3                 | 5  6
    width     0  1 | 2  3  4  2  3  4                 | 5  6

The slot of a token in the KV cache is not its position here. It is still the number of tokens
before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.hf.image_processor import ImageSpan

Axes = tuple[list[int], list[int], list[int]]  # time, height, width: a position of each token


def mrope_positions(num_tokens: int, spans: Iterable[ImageSpan]) -> tuple[Axes, int]:
    """Return the positions of a prompt, and what to add to the index of each token after it.

    num_tokens: of the prompt. spans: its images, in order.

    I1: the sum of the second value (vLLM's `mrope_position_delta`) and a token's index is one more
    than the largest position before it, on any axis, for the first token after the prompt.
    """
    axes: Axes = ([], [], [])
    time, height, width = axes
    position = 0  # of the next token of text

    def add_text(end: int) -> None:
        nonlocal position
        count = end - len(time)
        for axis in axes:
            axis += range(position, position + count)
        position += count

    for span in spans:
        add_text(span.start)
        rows, columns = span.image.rows, span.image.columns
        time += [position] * (rows * columns)
        height += [position + row for row in range(rows) for _ in range(columns)]
        width += [position + column for _ in range(rows) for column in range(columns)]
        position += max(rows, columns)
    add_text(num_tokens)
    return axes, position - num_tokens
