"""Checks that refuse bad input (I4). A message names the field, the limit and the value."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection, Sequence
from typing import Any

LARGEST_INT = 2**63 - 1  # tensors of integers hold 64 bits
SHOWN_CHARACTERS = 80

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = SHOWN_CHARACTERS


def require_int(
    field: str, value: Any, *, low: int, high: int = LARGEST_INT, optional: bool = False
) -> None:
    """Raise `ValueError` unless `value` is an int (no bool) in [low, high], or an allowed None."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"{field} must be an integer, between {low} and {high}, got {shown(value)}"
        )
    if not low <= value <= high:
        raise ValueError(f"{field} must be between {low} and {high}, got {shown(value)}")


def require_float(
    field: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise `ValueError` unless `value` is a finite number in [low, high], or (low, high]."""
    limit = f"in {'(' if open_low else '['}{low}, {high}{')' if high == math.inf else ']'}"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not _is_finite(value):
        raise ValueError(f"{field} must be a finite number {limit}, got {shown(value)}")
    if value < low or value > high or (open_low and value == low):
        raise ValueError(f"{field} must be {limit}, got {shown(value)}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


def require_choice(field: str, value: Any, choices: Collection[Any]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`, of the same type."""
    # The type is compared first: `==` between arrays gives an array, which is neither true nor
    # false.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(
            f"{field} must be one of {', '.join(map(str, choices))}, got {shown(value)}"
        )


def require_text(field: str, value: Any, *, longest: int | None = None) -> None:
    """Raise `ValueError` unless `value` is a string of 1 to `longest` Unicode characters."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a non-empty string, got {shown(value)}")
    if longest is not None and len(value) > longest:
        raise ValueError(
            f"{field} must have at most {longest} characters, got {len(value)}: {shown(value)}"
        )
    require_unicode(field, value)


def require_unicode(field: str, text: str) -> None:
    """Raise `ValueError` if `text` holds half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{field} must be valid Unicode text, got {text[error.start]!a} (half of a surrogate "
            f"pair) at character {error.start}: remove or replace it"
        ) from None


def require_list(field: str, value: Any, items: str, *, most: int = sys.maxsize) -> None:
    """Raise `ValueError` unless `value` is a sequence of at most `most` elements, no string.

    Generators, sets and arrays are refused too. items: what the elements are, for the message.
    """
    text_like = (str, bytes, bytearray, memoryview)
    if not isinstance(value, Sequence) or isinstance(value, text_like):
        raise ValueError(f"{field} must be a list of {items}, got {shown(value)}")
    if (size := size_of(value)) > most:
        raise ValueError(f"{field} must be a list of at most {most} {items}, got {size}")


def size_of(value: Sequence[Any]) -> int:
    """Return `len(value)`; of a range with more elements than `len` can count, `sys.maxsize`."""
    try:
        return len(value)
    except OverflowError:
        return sys.maxsize


def shown(value: Any) -> str:
    """Return `repr(value)`, shortened, for an error message. Never raises."""
    try:
        return _repr.repr(value)
    except Exception:  # an integer of thousands of digits, or a `__repr__` that fails
        return f"a value of type {type(value).__name__}"
