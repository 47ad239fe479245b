"""The checks of an `exercises.toml`: its form, and that the things it names exist."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..chain import place, short
from .delta import symbols as symbols_of
from .exercise import Exercise

KEYS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "title": (str,),
    "points": (int,),
    "hours": (int, float),
    "summary": (str,),
    "requires": (list,),
    "symbols": (list,),
    "tests": (list,),
    "hints": (list,),
    "mistake": (str,),
    "red": (list,),
    "answers": (str,),
}
OPTIONAL = {"requires", "mistake", "red", "answers"}
WORDS = {str: "text", int: "a whole number", float: "a number", list: "a list of texts"}


def problems_of_table(table: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the keys, types and sizes of an entry."""
    for key in sorted(table.keys() - KEYS.keys()):
        yield f"unknown key {key!r}; the keys are {', '.join(KEYS)}"
    for key in sorted(KEYS.keys() - table.keys() - OPTIONAL):
        yield f"{key} is missing"
    for key in filter(table.__contains__, KEYS):
        types, value = KEYS[key], table[key]
        size = len(value) if isinstance(value, list) else 1
        if not isinstance(value, types) or isinstance(value, bool):
            yield f"{key} must be {WORDS[types[-1]]}, not {value!r}"
        elif isinstance(value, str) and (not value.strip() or "\n" in value):
            yield f"{key} must be one line of text"
        elif isinstance(value, (int, float)) and value <= 0:
            yield f"{key} must be above 0, not {value}"
        elif isinstance(value, list) and not all(isinstance(v, str) and v.strip() for v in value):
            yield f"{key} must be a list of texts, none of them empty"
        elif key == "hints" and size != 3:
            yield f"there must be exactly three hints, not {size}"
        elif key == "symbols" and not 1 <= size <= 4:
            yield f"there must be one to four symbols, not {size}"
        elif key == "tests" and not size:
            yield "there must be a test"


def problems_of_links(exercises: tuple[Exercise, ...], root: Path | None) -> Iterator[str]:
    """Check that ids are in order, prerequisites come earlier, and symbols and tests have one
    owner. With a root, also check that symbols and tests exist."""
    symbols = Counter(symbol for exercise in exercises for symbol in exercise.symbols)
    for index, exercise in enumerate(exercises):
        found = []
        earlier = [other.id for other in exercises[:index]]
        expected = f"{short(exercise.milestone)}.{index + 1}"
        if exercise.id in earlier:
            found.append("there is another exercise with this id")
        elif exercise.id != expected:
            found.append(f"ids go up in order: this one must be {expected}")
        for name in exercise.requires:
            if name not in earlier:
                kind = "later" if name in [e.id for e in exercises[index:]] else "unknown"
                found.append(f"requires {name}, which is {kind}")
        for symbol in exercise.symbols:
            found += [f"{symbol} is named more than once"] if symbols[symbol] > 1 else []
        for test in exercise.tests:
            for other in exercises:
                if other is not exercise and any(_overlap(test, theirs) for theirs in other.tests):
                    found.append(f"{test} belongs to {other.id} too")
        if root is not None:
            found += filter(None, (missing_test(root, test) for test in exercise.tests))
            found += filter(None, (_missing_symbol(exercise, s, root) for s in exercise.symbols))
        yield from (f"{exercise.id}: {what}" for what in found)


def _missing_symbol(exercise: Exercise, symbol: str, root: Path) -> str | None:
    """Return why a symbol names no function, or None if it does."""
    file, _, name = symbol.partition(":")
    path = f"{place(exercise.milestone)}/{file}"
    if not (root / path).is_file():
        return f"{symbol}: there is no {path}"
    try:
        dump = symbols_of(root / path).get(name)
    except SyntaxError as error:
        return f"{path}:{error.lineno} {error.msg}"
    if dump is None:
        return f"{path} has no symbol {name!r}"
    if not dump.startswith(("FunctionDef", "AsyncFunctionDef")):
        return f"{symbol} is no function, so no body can be cut"
    return None


def _overlap(one: str, other: str) -> bool:
    """Return whether two tests have something in common. A file owns the tests in it."""
    return one == other or one.startswith(f"{other}::") or other.startswith(f"{one}::")


def missing_test(root: Path, test: str) -> str | None:
    """Return why a file or node id names no test, or None if it does."""
    file, _, rest = test.partition("::")
    if not (root / file).is_file():
        return f"{test}: there is no file {file}"
    body = ast.parse((root / file).read_text(encoding="utf-8"), file).body
    for name in rest.partition("[")[0].split("::") if rest else ():
        nodes = [node for node in body if getattr(node, "name", None) == name]
        if not nodes:
            return f"{test}: {file} has no {name}"
        body = getattr(nodes[0], "body", [])
    if not rest and not any(
        getattr(node, "name", "").startswith(("test", "Test")) for node in body
    ):
        return f"{test}: the file has no test"
    return None
