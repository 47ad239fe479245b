"""`StructuredOutputsParams`: what the whole text of an output must look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..validation import require_list, require_text
from .json_schema import MAX_CHARACTERS, schema_text
from .structural_tag import structural_tag_text

MAX_CHOICES = 10_000


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A grammar for the output of a request: exactly one of the four. The names are vLLM's.

    Wrong values raise `ValueError` (I4). Whether a schema or a regular expression can be compiled
    is found out by the engine.

    json: a JSON schema, as a dict or as text. The output is a JSON document that satisfies it, with
        the properties in the order of the schema. It is stored as text.
    regex: a regular expression that the whole output matches.
    choice: strings. The output is one of them.
    structural_tag: text with marked parts, as a dict or as text: see `structural_tag.py`. It is
        stored as text.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(names)}, got "
                f"{' and '.join(given) or 'none of them'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", schema_text("structured_outputs: json", self.json))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", structural_tag_text(self.structural_tag))
        if self.regex is not None:
            require_text("structured_outputs: regex", self.regex, longest=MAX_CHARACTERS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))


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
