"""Compare two milestones by symbol: what the upper one adds, changes and removes.

`DELTA.toml` declares each difference with a reason. The sources are compared as syntax trees, so
layout and comments do not count. A symbol is `file.py:function`, `file.py:Class.method`,
`file.py:Class` (its bases, docstring and attributes) or `file.py:<module>` (docstring, imports,
constants). An entry with only a file stands for all symbols of the file. An entry with a class that
was added or removed stands for the class and its methods.

    below = "m1_single"
    [added]
    "kv_cache.py" = "every running request owns a row of the cache"
    [changed]
    "engine.py:EngineCore.step" = "many requests move in a step"

A large difference may be divided into stops, in reading order, which are read one at a time:

    [[stop]]
    title = "Pages instead of rows"
    teaches = "A request holds only the pages that its tokens need."
    symbols = ["kv_cache.py", "scheduler.py:Scheduler.undo"]

A name in `symbols` is an entry, or a file or class that stands for all entries in it. An entry that
several names stand for belongs to the closest of them (a method is closer than its class, a class
closer than its file), and to the first stop among equals. Entries without a stop come last.

A file or a class that was added is one entry. Notes say of its symbols why they are as they are:

    [notes]
    "radix_cache.py:RadixCache.lock" = "a request locks the prefix that it reads, so that ..."
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..chain import ROOT, below, course_place, own_name, sources
from .outline import MODULE, Definition, Function, definitions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

KINDS = ("added", "changed", "removed")
REST = "The rest"  # the title of the last stop, which has the entries that no other stop names
REST_TEACHES = "Nothing new: imports, the package's docstring, the demo."


@dataclass(frozen=True)
class Delta:
    """Symbols by kind. `reasons` is empty unless the delta was read from a `DELTA.toml`."""

    below: str
    added: frozenset[str]
    changed: frozenset[str]
    removed: frozenset[str]
    reasons: dict[str, str]  # in reading order
    stops: dict[str, tuple[str, ...]] = field(default_factory=dict)  # title -> entries
    teaches: dict[str, str] = field(default_factory=dict)  # title of a stop -> a sentence
    notes: dict[str, str] = field(default_factory=dict)  # symbol of an added file or class -> why


def declared(milestone: str, root: Path | None = None) -> Delta:
    """Read `milestones/<milestone>/DELTA.toml`. Raises `ValueError` that names file and entry."""
    path = (root or ROOT) / course_place(milestone) / "DELTA.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    if unknown := table.keys() - {"below", "stop", "notes", *KINDS}:
        raise ValueError(f"{path}: unknown tables {sorted(unknown)}")
    reasons = {symbol: reason for kind in KINDS for symbol, reason in table.get(kind, {}).items()}
    notes = table.get("notes", {})
    for symbol, reason in (*reasons.items(), *notes.items()):
        if not isinstance(reason, str) or not reason.strip() or "\n" in reason:
            raise ValueError(f"{path}: {symbol} needs a reason of one line")
    stops = _stops(table.get("stop", []), list(reasons), path)
    first = [symbol for entries in stops.values() for symbol in entries]
    reasons = {symbol: reasons[symbol] for symbol in [*first, *reasons]}
    return Delta(
        below=table["below"],
        added=frozenset(table.get("added", {})),
        changed=frozenset(table.get("changed", {})),
        removed=frozenset(table.get("removed", {})),
        reasons=reasons,
        stops=stops,
        teaches={stop["title"]: stop.get("teaches", "") for stop in table.get("stop", [])},
        notes=notes,
    )


def _stops(tables: Any, entries: list[str], path: Path) -> dict[str, tuple[str, ...]]:
    """Return the entries of each stop, by title. Raises `ValueError` that names file and stop."""
    try:
        named = {table["title"]: list(dict.fromkeys(table["symbols"])) for table in tables}
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: each [[stop]] has a title and a list of symbols") from error
    if len({REST, *named}) <= len(tables):
        raise ValueError(f"{path}: each stop needs a title of its own, and not {REST!r}")
    owner = {}
    for entry in entries:
        places = [(t, n) for t, names in named.items() for n in names if covers(n, entry)]
        if places:  # `max` returns the first of several names of the same length
            owner[entry] = max(places, key=lambda place: len(place[1]))
    stops = {}
    for title, names in named.items():
        for name in names:
            if not any(covers(name, entry) for entry in entries):
                raise ValueError(f"{path}: stop {title!r} names {name!r}, which is not declared")
        order = [entry for name in names for entry in entries if owner.get(entry) == (title, name)]
        if not order:
            raise ValueError(f"{path}: stop {title!r} has no symbol that is not in another stop")
        stops[title] = tuple(order)
    return stops


def found_in(milestone: str, root: Path = ROOT) -> Delta:
    """Return how an engine differs from the one below it."""
    lower = below(milestone, root)
    assert lower is not None, f"{milestone} is the lowest milestone"
    return compared(lower, sources(lower, root), sources(milestone, root))


def compared(below: str, old: dict[str, Path], new: dict[str, Path]) -> Delta:
    """Compare the sources of two engines, by name, and return how they differ."""
    before_of, after_of = by_file(old, symbols), by_file(new, symbols)
    added = {name for name in after_of if name not in before_of}
    removed = {name for name in before_of if name not in after_of}
    changed = set()
    for name in before_of.keys() & after_of.keys():
        before, after = before_of[name], after_of[name]
        added |= {f"{name}:{symbol}" for symbol in after.keys() - before.keys()}
        removed |= {f"{name}:{symbol}" for symbol in before.keys() - after.keys()}
        common = before.keys() & after.keys()
        changed |= {f"{name}:{symbol}" for symbol in common if before[symbol] != after[symbol]}
    return Delta(below, frozenset(added), frozenset(changed), frozenset(removed), {})


def by_file(
    files: dict[str, Path], read: Callable[[Path], dict[str, T]]
) -> dict[str, dict[str, T]]:
    """Return the symbols of each file of an engine, as `read` finds them.

    If a file extends that of the milestone below, the symbols of both are its own. Those that stand
    in both have the text of the upper one.
    """
    found: dict[str, dict[str, T]] = {}
    for name in sorted(files, key=lambda name: own_name(name) == name):  # extended files first
        found[own_name(name)] = found.get(own_name(name), {}) | read(files[name])
    return {name: found[name] for name in files if name in found}


def problems(says: Delta, real: Delta) -> list[str]:
    """Return a sentence for each undeclared difference and for each declaration without one."""
    whole_files = {entry for entry in says.changed if ":" not in entry}
    lines = []
    for kind in KINDS:
        declared_symbols, real_symbols = getattr(says, kind), getattr(real, kind)
        for symbol in sorted(real_symbols - declared_symbols):
            # An entry for a class that is added or removed stands for its methods.
            of_class = kind != "changed" and symbol.rpartition(".")[0] in declared_symbols
            if symbol.split(":")[0] not in whole_files and not of_class:
                lines.append(f"{symbol} is {kind}, but not declared")
        for symbol in sorted(declared_symbols - real_symbols - whole_files):
            lines.append(f"{symbol} is declared as {kind}, but is not")
    touched = {symbol.split(":")[0] for symbol in real.added | real.changed | real.removed}
    lines += [f"{name} is declared as changed, but is not" for name in whole_files - touched]
    return lines


def problems_of_notes(says: Delta, files: dict[str, Path]) -> list[str]:
    """Return a sentence for each note without a symbol, or on a symbol that has its own entry."""
    there, lines = by_file(files, symbols), []
    for symbol in says.notes:
        file, _, name = symbol.partition(":")
        if name not in there.get(file, {}):
            lines.append(f"{symbol} has a note, but does not exist")
        elif not any(covers(entry, symbol) and entry != symbol for entry in says.added):
            lines.append(f"{symbol} has a note, but is in no file or class that is added")
    return lines


def covers(entry: str, symbol: str) -> bool:
    """Return whether an entry (a file, a class or a symbol) stands for a symbol."""
    return symbol == entry or symbol.startswith((f"{entry}:", f"{entry}."))


def symbols(path: Path) -> dict[str, str]:
    """Return the symbols of a file, each with a dump of its syntax tree."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    named = [*definitions(tree)]
    rest = [node for node in tree.body if not isinstance(node, Definition)]
    result = {MODULE: "".join(map(ast.dump, rest))}
    for name, node in named:
        if isinstance(node, ast.ClassDef):
            node.body = [inner for inner in node.body if not isinstance(inner, Function)]
        # A property and its setter share a name: the dump holds both.
        result[name] = result.get(name, "") + ast.dump(node)
    return result
