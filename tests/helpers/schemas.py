"""Random JSON schemas, of which every keyword must be followed by an output."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("name", "age", "city", "tags", "is_new", "size", "a b", 'q"t', "größe")


def schema(chance: Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of an object with up to four properties."""
    names = chance.sample(NAMES, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: value(chance, depth - 1) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
        "additionalProperties": False,
    }


def value(chance: Random, depth: int) -> dict[str, Any]:
    """Return a schema of a value. At depth 0 it has no parts."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "const"]
    kind = chance.choice(kinds + (["array", "object", "anyOf"] * 2 if depth > 0 else []))
    low = chance.randint(0, 3)
    if kind == "string":
        return {"type": kind, "minLength": low, "maxLength": low + chance.randint(0, 4)}
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": -low, "maximum": low + chance.choice([0, 1, 5, 100])}
    if kind == "enum":
        options = ["red", 'a"b', 7, None, True, "\n", [1], {"x": 1}]
        return {"enum": chance.sample(options, chance.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[ab]{3}$", "^(x|yz)+$", "^[0-9]*-$"])}
    if kind == "const":
        return {"const": chance.choice(["fixed", 3, False, {"k": [None]}])}
    if kind == "array":
        most = low + chance.randint(0, 2)
        return {"type": kind, "items": value(chance, 0), "minItems": low, "maxItems": most}
    if kind == "object":
        return schema(chance, depth)
    if kind == "anyOf":
        return {"anyOf": [value(chance, 0) for _ in range(2)]}
    return {"type": kind}
