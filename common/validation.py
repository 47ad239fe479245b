"""Checks that refuse bad input by name (I4): a message says field, limit and value."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def require_int(
    field: str, value: Any, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    """Raise `ValueError` unless `value` is an int (no bool) in [low, high], or an allowed None."""
    if value is None and optional:
        return
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field} must be an integer, {limit}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{field} must be {limit}, got {value}")


def require_float(
    field: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise `ValueError` unless `value` is a finite number in [low, high], or (low, high]."""
    limit = f"in {'(' if open_low else '['}{low}, {high}{')' if high == math.inf else ']'}"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not _is_finite(value):
        raise ValueError(f"{field} must be a finite number {limit}, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise ValueError(f"{field} must be {limit}, got {value}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False


def require_choice(field: str, value: Any, choices: Collection[Any]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`, of the same type."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"{field} must be one of {', '.join(map(str, choices))}, got {value!r}")
