"""Compare the symbols of two milestones, and show the lines of each difference."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ...chain import sources
from .. import delta
from ..outline import MODULE, Line, outline

CONTEXT = 3  # unchanged lines around a change
REWRITTEN = 0.3  # if old and new text are less alike than this, both are shown completely

Sources = dict[str, dict[str, list[Line]]]  # file -> symbol -> lines


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
    starts: dict[int, str] = field(default_factory=dict)  # first line -> symbol of a whole file

    @property
    def file(self) -> str:
        return self.symbol.partition(":")[0]

    @property
    def num_symbols(self) -> int:
        return max(1, len(self.starts))


def sources_of(milestone: str, root: Path) -> Sources:
    """Return the lines of each symbol of an engine."""

    def read(path: Path) -> dict[str, list[Line]]:
        return outline(path.read_text(encoding="utf-8"))

    return delta.by_file(sources(milestone, root), read)


def differing(old: Sources, new: Sources) -> dict[str, str]:
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


def parts_of(entry: str, mine: dict[str, str], old: Sources, new: Sources) -> list[Part]:
    """Return one part for a whole file or class that was added or removed, else one per symbol."""
    kinds = set(mine.values())
    if len(mine) > 1 and len(kinds) == 1 and kinds != {"changed"} and _whole(entry, mine, old, new):
        (kind,) = kinds
        of_symbols = {s: _lines(new if kind == "added" else old, s) for s in mine}
        starts = {lines[0].number: symbol for symbol, lines in of_symbols.items()}
        gaps = _with_gaps(sorted(chain(*of_symbols.values()), key=lambda line: line.number))
        sides = ([], gaps) if kind == "added" else (gaps, [])
        return [Part(entry, kind, [Block("change", *sides)], starts=starts)]
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
