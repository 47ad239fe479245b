"""Pair the lines of two blocks of code, so that similar lines stand beside each other."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache

from ..outline import Line

ALIKE = 0.6  # share of equal words; lines that are less alike do not correspond
LARGEST = 2500  # pairs of lines that are compared; the lines of a larger block are not paired

Row = tuple[Line | None, Line | None]


def aligned(old: list[Line], new: list[Line]) -> list[Row]:
    """Return rows of two columns. Every line is in one row, in order, beside its counterpart."""
    rows: list[Row] = []
    i = j = 0
    for a, b in [*_pairs(old, new), (len(old), len(new))]:
        # The lines before a pair have no counterpart: they are put side by side in order.
        left, right = old[i:a], new[j:b]
        for k in range(max(len(left), len(right))):
            rows.append((left[k] if k < len(left) else None, right[k] if k < len(right) else None))
        if a < len(old):
            rows.append((old[a], new[b]))
        i, j = a + 1, b + 1
    return rows


def words(text: str) -> list[str]:
    """Split a line into words, spaces and other characters."""
    return re.findall(r"\w+|\s+|.", text)


@lru_cache(maxsize=1 << 16)
def likeness(old: str, new: str) -> float:
    """Return which share of two lines is equal, from 0 to 1. Spaces do not count."""
    before, after = ([word for word in words(text) if word.strip()] for text in (old, new))
    return difflib.SequenceMatcher(None, before, after, autojunk=False).ratio()


def _pairs(old: list[Line], new: list[Line]) -> list[tuple[int, int]]:
    """Return the indices of corresponding lines, in order, with the largest sum of likenesses."""
    if len(old) * len(new) > LARGEST:
        return []
    # best[i][j] is the largest sum for old[i:] and new[j:].
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            alike = likeness(old[i].text, new[j].text)
            pair = alike + best[i + 1][j + 1] if alike >= ALIKE else 0.0
            best[i][j] = max(pair, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs
