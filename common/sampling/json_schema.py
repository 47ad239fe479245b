"""JSON schemas of grammars: what can be refused before a grammar is compiled."""

from __future__ import annotations

import json
from typing import Any

from ..validation import require_text, shown

MAX_CHARACTERS = 100_000  # of a schema, a regular expression, or all choices together
# Pairs of bounds of a number; the first one of each is excluded.
RANGES = [
    ("exclusiveMinimum", "maximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
    ("exclusiveMaximum", "minimum"),
    ("exclusiveMaximum", "exclusiveMinimum"),
]


def schema_text(name: str, schema: Any) -> str:
    """Return a JSON schema as text. It may be a dict, or text already.

    Raises `ValueError`, which begins with `name`, for anything else.
    """
    text, value = json_object(name, schema)
    _require_exact_ranges(name, value)
    return text


def json_object(name: str, given: Any) -> tuple[str, dict[str, Any]]:
    """Return a JSON object as text and as a dict. Raises `ValueError`, which begins with `name`."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        value = json.loads(text) if len(text) <= MAX_CHARACTERS else None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON schema, got {shown(given)}: {error}") from None
    require_text(name, text, longest=MAX_CHARACTERS)
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, a schema, got {shown(given)}")
    return text, value


def _require_exact_ranges(name: str, schema: Any) -> None:
    """Raise `ValueError` for a range of numbers in which llguidance allows an excluded bound.

    It does so if this bound is an integer and the other bound is less than 1 away.
    """
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        parts += part.values()
        numbers = {key: value for key, value in part.items() if type(value) in (int, float)}
        for excluded, beside in RANGES:
            if not {excluded, beside} <= numbers.keys():
                continue
            bound, other = numbers[excluded], numbers[beside]
            if bound % 1 == 0 and other - 1 < bound < other + 1:
                raise ValueError(
                    f"{name}: {excluded}={shown(bound)} with {beside}="
                    f"{shown(other)} is not supported: use a bound {excluded} that is no integer, "
                    "or bounds that are further apart"
                )
