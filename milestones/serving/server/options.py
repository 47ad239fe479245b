"""Options of a command line, made from the fields of a dataclass and from its docstring."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

FIELD = re.compile(r"^    (\w+): (.+?)(?=^    \w+: |^    \Z|^\s*$|\Z)", re.MULTILINE | re.DOTALL)
Record = TypeVar("Record")


def add_options(parser: argparse.ArgumentParser, record: type) -> None:
    """Add an option for each field of a dataclass: `--max-num-seqs` for `max_num_seqs`.

    The help of an option is the paragraph `name: text` of the docstring.
    """
    group = parser.add_argument_group(record.__name__)
    hints, help_of = get_type_hints(record), described(record)
    for field in fields(record):
        text = f"{help_of[field.name]} (default: {field.default})".replace("%", "%%")
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, default=field.default, help=text, **_reading(hints[field.name]))


def from_options(record: type[Record], args: argparse.Namespace) -> Record:
    """Return a dataclass with the values of the options. Raises `ValueError` as it does."""
    return record(**{field.name: getattr(args, field.name) for field in fields(record)})  # type: ignore[arg-type]


def described(record: type) -> dict[str, str]:
    """Return the text about each field in the docstring of a dataclass."""
    found = FIELD.findall(record.__doc__ or "")
    return {name: " ".join(text.split()).replace("`", "") for name, text in found}


def _reading(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that read a value of this type."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    (kind,) = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    return {"type": kind, "metavar": kind.__name__.upper()}
