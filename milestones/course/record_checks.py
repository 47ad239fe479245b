"""The checks of an `exercises.toml`: its form, and that the things it names exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
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


class Problems:
    """The problems, one line each. TOML's parser keeps no line numbers, so they are looked up."""

    def __init__(self, file: str, lines: list[tuple[int, dict[str, int]]]) -> None:
        self.file = file
        self.where = lines  # for each entry, its first line and the line of each key
        self.names: list[str] = []
        self.lines: list[str] = []

    def add(self, entry: int | None, key: str | None, what: str) -> None:
        """Add a problem of a key of an entry (by index), or of the file if both are None."""
        if entry is None or entry >= len(self.where):
            self.lines.append(f"{self.file}: {what}")
            return
        first, keys = self.where[entry]
        name = self.names[entry] if entry < len(self.names) else f"exercise {entry + 1}"
        self.lines.append(f"{self.file}:{keys.get(key or '', first)}: {name}: {what}")


def lines_of(text: str) -> list[tuple[int, dict[str, int]]]:
    """Return the line of each `[[exercise]]` and the lines of its keys, counted from 1."""
    found: list[tuple[int, dict[str, int]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*exercise\s*\]\]", line):
            found.append((number, {}))
        elif found and (key := re.match(r"\s*(\w+)\s*=", line)):
            found[-1][1].setdefault(key[1], number)
    return found


def check_table(table: dict[str, Any], index: int, problems: Problems) -> bool:
    """Return whether an entry has the right keys, types and sizes."""
    before = len(problems.lines)
    problems.names.append(str(table.get("id", f"exercise {index + 1}")))
    for key in table.keys() - KEYS.keys():
        problems.add(index, key, f"unknown key {key!r}; the keys are {', '.join(KEYS)}")
    for key in KEYS.keys() - table.keys() - OPTIONAL:
        problems.add(index, None, f"{key} is missing")
    for key, types in KEYS.items():
        if key not in table:
            continue
        value = table[key]
        size = len(value) if isinstance(value, list) else 1
        if not isinstance(value, types) or isinstance(value, bool):
            problems.add(index, key, f"{key} must be {WORDS[types[-1]]}, not {value!r}")
        elif isinstance(value, str) and (not value.strip() or "\n" in value):
            problems.add(index, key, f"{key} must be one line of text")
        elif isinstance(value, (int, float)) and value <= 0:
            problems.add(index, key, f"{key} must be above 0, not {value}")
        elif isinstance(value, list) and not all(isinstance(v, str) and v.strip() for v in value):
            problems.add(index, key, f"{key} must be a list of texts, none of them empty")
        elif key == "hints" and size != 3:
            problems.add(index, key, f"there must be exactly three hints, not {size}")
        elif key == "symbols" and not 1 <= size <= 4:
            problems.add(index, key, f"there must be one to four symbols, not {size}")
        elif key == "tests" and not size:
            problems.add(index, key, "there must be a test")
    return len(problems.lines) == before


def check_links(exercises: tuple[Exercise, ...], root: Path | None, problems: Problems) -> None:
    """Check that ids are in order, prerequisites come earlier, and symbols and tests have one
    owner. With a root, also check that symbols and tests exist."""
    for index, exercise in enumerate(exercises):
        owner = short(exercise.milestone)
        if exercise.id in [other.id for other in exercises[:index]]:
            problems.add(index, "id", "there is another exercise with this id")
        elif exercise.id != f"{owner}.{index + 1}":
            problems.add(index, "id", f"ids go up in order: this one must be {owner}.{index + 1}")
        earlier = {other.id for other in exercises[:index]}
        for name in exercise.requires:
            if name not in earlier:
                kind = "later" if name in [e.id for e in exercises[index:]] else "unknown"
                problems.add(index, "requires", f"requires {name}, which is {kind}")
        if root is not None:
            _check_files(exercise, index, root, problems)
    _check_owners(exercises, problems)


def _check_files(exercise: Exercise, index: int, root: Path, problems: Problems) -> None:
    for test in exercise.tests:
        if wrong := missing_test(root, test):
            problems.add(index, "tests", wrong)
    for symbol in exercise.symbols:
        file, _, name = symbol.partition(":")
        folder = place(exercise.milestone)
        path = root / folder / file
        if not path.is_file():
            problems.add(index, "symbols", f"{symbol}: there is no {folder}/{file}")
            continue
        try:
            dump = symbols_of(path).get(name)
        except SyntaxError as error:
            problems.add(index, "symbols", f"{folder}/{file}:{error.lineno} {error.msg}")
            continue
        if dump is None:
            problems.add(index, "symbols", f"{folder}/{file} has no symbol {name!r}")
        elif not dump.startswith(("FunctionDef", "AsyncFunctionDef")):
            problems.add(index, "symbols", f"{symbol} is no function, so no body can be cut")


def _check_owners(exercises: tuple[Exercise, ...], problems: Problems) -> None:
    """Check that a symbol or a test belongs to one exercise. A file owns the tests in it."""
    symbols = Counter(symbol for exercise in exercises for symbol in exercise.symbols)
    for index, exercise in enumerate(exercises):
        for symbol in exercise.symbols:
            if symbols[symbol] > 1:
                problems.add(index, "symbols", f"{symbol} is named more than once")
        for test in exercise.tests:
            for other in exercises:
                if other is not exercise and any(_overlap(test, theirs) for theirs in other.tests):
                    problems.add(index, "tests", f"{test} belongs to {other.id} too")


def _overlap(one: str, other: str) -> bool:
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
