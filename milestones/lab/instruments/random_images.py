"""Prompts with images of random numbers, for the tiny models: no files, and no Pillow."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from common import TokensPrompt
from common.hf.image_processor import ImageSpan, ProcessedImage

from ...chain import load

IMAGE_TOKEN = 261  # `<|image_pad|>` of the tiny models
MERGE = 2  # patches of a token, in each direction
PATCH_NUMBERS = 3 * 2 * 4 * 4  # of a patch: colours, times, height, width

Piece = int | tuple[int, int, int]  # a token, or an image: its number, its rows and its columns


@functools.cache
def image_of(number: int, rows: int, columns: int) -> ProcessedImage:
    """Return an image of random pixels. Its number and its size decide its digest."""
    digest = (number * 1000 + rows) * 1000 + columns + 1
    patches = rows * columns * MERGE**2
    pixels = np.random.default_rng(digest).standard_normal((patches, PATCH_NUMBERS))
    return ProcessedImage(digest, rows, columns, pixels.astype(np.float32))


def prompt_of(pieces: Sequence[Piece], image_token: int = IMAGE_TOKEN) -> TokensPrompt:
    """Return a prompt of tokens and images, as `ImageInputProcessor` makes it."""
    images: Any = load("vision", "images").PromptImages
    token_ids: list[int] = []
    spans = []
    for piece in pieces:
        if isinstance(piece, int):
            token_ids.append(piece)
            continue
        span = ImageSpan(len(token_ids), image_of(*piece))
        spans.append(span)
        token_ids += [image_token] * span.image.num_tokens
    found = images(len(token_ids), spans) if spans else None
    return TokensPrompt(token_ids, None, found)
