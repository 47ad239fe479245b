"""The lesson between two milestones as a tour: for each difference its reason and the code.

The tour has the entries of `DELTA.toml`, in its reading order. Unchanged code is in no entry. Code
that was only moved is named and not shown. Differences that are not declared (comments, layout)
come last, so every difference is in the tour. `DELTA.toml` may divide a large tour into stops.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...chain import chain, find_pair, sources
from .. import delta
from ..outline import MODULE, Line, outline

CONTEXT = 3  # unchanged lines around a change
REWRITTEN = 0.3  # if old and new text are less alike than this, both are shown completely
UNDECLARED = "undeclared difference: comments or layout"


@dataclass(frozen=True)
class Block:
    """Lines of both milestones that stand beside each other.

    kind: `same` (equal lines), `fold` (equal lines far from any change), or `change` (lines of the
    milestone below, of the one above, or of both).
    """

    kind: str
    old: list[Line]
    new: list[Line]


@dataclass(frozen=True)
class Part:
    """The difference of one symbol, or of a whole file or class that was added or removed."""

    symbol: str
    kind: str  # added, changed, removed
    blocks: list[Block]
    moved: str | None = None  # the place of the same text in the other milestone
    num_symbols: int = 1

    @property
    def file(self) -> str:
        return self.symbol.partition(":")[0]


@dataclass(frozen=True)
class Entry:
    """An entry of `DELTA.toml`, its reason, and the symbols that it covers."""

    name: str
    kind: str
    reason: str
    milestone: str  # the milestone of this DELTA.toml
    parts: list[Part]


@dataclass(frozen=True)
class Stop:
    """A part of a tour that can be read alone. A tour that is not divided has one, without a title.

    Numbers begin at 1.
    """

    number: int
    title: str
    entries: list[Entry]

    @property
    def num_symbols(self) -> int:
        return sum(part.num_symbols for entry in self.entries for part in entry.parts)

    @property
    def num_lines(self) -> tuple[int, int]:
        """The lines that the diff shows as added and as removed."""
        blocks = [b for e in self.entries for part in e.parts for b in part.blocks]
        changes = [block for block in blocks if block.kind == "change"]
        return sum(len(block.new) for block in changes), sum(len(block.old) for block in changes)


@dataclass
class Lesson:
    """All differences between two milestones, or a selection of them."""

    below: str
    above: str
    stops: list[Stop]
    untouched: list[str] = field(default_factory=list)  # symbols that are the same in both

    @property
    def entries(self) -> list[Entry]:
        return [entry for stop in self.stops for entry in stop.entries]

    @property
    def is_divided(self) -> bool:
        """Whether the tour has declared stops."""
        return any(stop.title for stop in self.stops)


def lesson(below: str, above: str, root: Path = delta.ROOT) -> Lesson:
    """Return the lesson from one milestone to a higher one, through all milestones between them.

    Raises `ValueError` for a name that is no milestone, and for two milestones in the wrong order.
    """
    below, above = find_pair(below, above, root)
    lower = chain(above, root)[:-1]
    old, new = _sources(below, root), _sources(above, root)
    covered: set[str] = set()
    entries: list[Entry] = []
    differing = _differing(old, new)
    for milestone in [*lower[lower.index(below) + 1 :], above]:
        for entry, reason in delta.declared(milestone, root).reasons.items():
            mine = {
                s: k for s, k in differing.items() if s not in covered and delta.covers(entry, s)
            }
            # An entry for an added class stands for its methods; one for a changed class does not.
            if ":" in entry and mine.get(entry) == "changed":
                mine = {entry: "changed"}
            covered |= mine.keys()
            if parts := _parts(entry, mine, old, new):
                entries.append(Entry(entry, _kind(parts), reason, milestone, parts))
    for symbol, kind in differing.items():
        if symbol not in covered:
            parts = _parts(symbol, {symbol: kind}, old, new)
            entries.append(Entry(symbol, kind, UNDECLARED, above, parts))
    same = [f"{f}:{s}" for f in new for s in new[f] if f"{f}:{s}" not in differing]
    # The stops of a milestone divide the tour from the milestone below it, and no longer tour.
    stops = delta.declared(above, root).stops if below == lower[-1] else {}
    return Lesson(below, above, _stops(entries, stops), same)


def _stops(entries: list[Entry], declared: dict[str, tuple[str, ...]]) -> list[Stop]:
    """Return the entries in their stops. The last stop has the entries that no other has."""
    if not declared:
        return [Stop(1, "", entries)]
    title_of = {name: title for title, names in declared.items() for name in names}
    stops = []
    for number, title in enumerate([*declared, delta.REST], start=1):
        if mine := [entry for entry in entries if title_of.get(entry.name, delta.REST) == title]:
            stops.append(Stop(number, title, mine))
    return stops


Sources = dict[str, dict[str, list[Line]]]  # file -> symbol -> lines


def _sources(milestone: str, root: Path) -> Sources:
    def read(path: Path) -> dict[str, list[Line]]:
        return outline(path.read_text(encoding="utf-8"))

    return delta.by_file(sources(milestone, root), read)


def _differing(old: Sources, new: Sources) -> dict[str, str]:
    """Return each symbol that differs, and how, in the order of the files above, then below."""
    found = {}
    for file in [*new, *(name for name in old if name not in new)]:
        before, after = old.get(file, {}), new.get(file, {})
        for symbol in [*after, *(name for name in before if name not in after)]:
            was, now = _texts(before.get(symbol, [])), _texts(after.get(symbol, []))
            if was != now:
                kind = "changed" if was and now else "added" if now else "removed"
                found[f"{file}:{symbol}"] = kind
    return found


def _parts(entry: str, mine: dict[str, str], old: Sources, new: Sources) -> list[Part]:
    """Return one part for a whole file or class that was added or removed, else one per symbol."""
    kinds = set(mine.values())
    if len(mine) > 1 and len(kinds) == 1 and kinds != {"changed"} and _whole(entry, mine, old, new):
        (kind,) = kinds
        lines = sorted(
            (line for symbol in mine for line in _lines(new if kind == "added" else old, symbol)),
            key=lambda line: line.number,
        )
        gaps = _with_gaps(lines)
        sides = ([], gaps) if kind == "added" else (gaps, [])
        return [Part(entry, kind, [Block("change", *sides)], num_symbols=len(mine))]
    parts = []
    for symbol, kind in mine.items():
        before, after = _lines(old, symbol), _lines(new, symbol)
        moved = _moved_to(symbol, before or after, new if kind == "removed" else old)
        moved = moved if kind != "changed" else None
        blocks = [] if moved else list(_blocks(before, after))
        parts.append(Part(symbol, kind, blocks, moved))
    return parts


def _whole(entry: str, mine: dict[str, str], old: Sources, new: Sources) -> bool:
    """Return whether a file or class exists in only one of the milestones."""
    file, _, name = entry.partition(":")
    before, after = (name in s.get(file, {}) if name else file in s for s in (old, new))
    return before != after


def _moved_to(symbol: str, lines: list[Line], other: Sources) -> str | None:
    """Return the place of a symbol with the same text in the other milestone, if it was moved."""
    file, _, name = symbol.partition(":")
    for candidate, symbols in other.items():
        for theirs, text in symbols.items():
            same_place = (candidate, theirs) == (file, name)
            if name != MODULE and not same_place and _texts(text) == _texts(lines):
                return f"{candidate}:{theirs}"
    return None


def _blocks(old: list[Line], new: list[Line]) -> Iterator[Block]:
    matcher = difflib.SequenceMatcher(None, _texts(old), _texts(new), autojunk=False)
    if not old or not new or matcher.ratio() < REWRITTEN:
        yield Block("change", old, new)
        return
    seen = 0  # lines of `old`; the equal lines between two groups are folded
    shift = 0  # from a line of `old` to the equal line of `new`
    for group in [*matcher.get_grouped_opcodes(CONTEXT), [("equal", len(old), 0, len(new), 0)]]:
        _, start, _, first, _ = group[0]
        if seen < start:
            kind = "fold" if start - seen > 1 else "same"
            yield Block(kind, old[seen:start], new[seen + shift : first])
        for tag, i, j, k, end in group:
            if i < j or k < end:
                yield Block("same" if tag == "equal" else "change", old[i:j], new[k:end])
            seen, shift = j, end - j


def _with_gaps(lines: list[Line]) -> list[Line]:
    """Put blank lines back between lines that were not neighbours."""
    kept: list[Line] = []
    for line in lines:
        if kept and line.number > kept[-1].number + 1:
            kept += [Line(n, "") for n in range(kept[-1].number + 1, line.number)]
        kept.append(line)
    return kept


def _lines(sources: Sources, symbol: str) -> list[Line]:
    file, _, name = symbol.partition(":")
    return sources.get(file, {}).get(name, [])


def _texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def _kind(parts: list[Part]) -> str:
    kinds = {part.kind for part in parts}
    return kinds.pop() if len(kinds) == 1 else "changed"
