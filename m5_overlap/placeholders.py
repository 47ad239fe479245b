"""Placeholders stand for tokens that the host does not know yet. Plain Python data."""

from __future__ import annotations

PADDING_INDEX = 0  # padding rows of a batch store their tokens here


def future_index(row: int | None) -> int:
    """Return the place of a row in the map and in the page table. Place 0 is for padding."""
    assert row is not None, "I3: only a running request has a place"
    return row + 1


def placeholder(row: int | None) -> int:
    """Return the number that stands for the next token of the request in a row.

    It is always negative, so that it differs from every token id.
    """
    return -future_index(row)
