"""`StructuredOutputsParams`: what the whole text of an output must look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..validation import require_list, require_text, shown

MAX_CHARACTERS = 100_000  # of a schema, a regular expression, or all choices together
MAX_CHOICES = 10_000
# Pairs of bounds of a number; the first one of each is excluded.
RANGES = [
    ("exclusiveMinimum", "maximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
    ("exclusiveMaximum", "minimum"),
    ("exclusiveMaximum", "exclusiveMinimum"),
]


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A grammar for the output of a request: exactly one of the three. The names are vLLM's.

    Wrong values raise `ValueError` (I4). Whether a schema or a regular expression can be compiled
    is found out by the engine.

    json: a JSON schema, as a dict or as text. The output is a JSON document that satisfies it, with
        the properties in the order of the schema. It is stored as text.
    regex: a regular expression that the whole output matches.
    choice: strings. The output is one of them.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "structured_outputs must have exactly one of json, regex and choice, got "
                f"{' and '.join(given) or 'none of them'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.regex is not None:
            require_text("structured_outputs: regex", self.regex, longest=MAX_CHARACTERS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))


def _schema(schema: Any) -> str:
    """Return a JSON schema as text."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        require_text("structured_outputs: json", text, longest=MAX_CHARACTERS)
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(
                f"structured_outputs: json must be a JSON object, a schema, got {shown(schema)}"
            )
    except (TypeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(
            f"structured_outputs: json must be a JSON schema, got {shown(schema)}: {error}"
        ) from None
    _require_exact_ranges(value)
    return text


def _require_exact_ranges(schema: Any) -> None:
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
        numbers = {name: value for name, value in part.items() if type(value) in (int, float)}
        for excluded, name in RANGES:
            if not {excluded, name} <= numbers.keys():
                continue
            bound, other = numbers[excluded], numbers[name]
            if bound % 1 == 0 and other - 1 < bound < other + 1:
                raise ValueError(
                    f"structured_outputs: json: {excluded}={shown(bound)} with {name}="
                    f"{shown(other)} is not supported: use a bound {excluded} that is no integer, "
                    "or bounds that are further apart"
                )


def _choices(choices: Any) -> tuple[str, ...]:
    name = "structured_outputs: choice"
    require_list(name, choices, "strings", most=MAX_CHOICES)
    if not choices:
        raise ValueError(f"{name} must not be empty")
    for choice in choices:
        require_text(name, choice)
    if (size := sum(map(len, choices))) > MAX_CHARACTERS:
        raise ValueError(f"{name} must have at most {MAX_CHARACTERS} characters, got {size}")
    return tuple(choices)
