"""The lesson between two milestones as a tour of stops: a reason, and the code that differs.

A stop is an entry of `DELTA.toml`, in the order of that file. Unchanged code is in no stop. Code
that was only moved is named and not shown. Differences that are not declared (comments, layout)
come last, so every difference is in the tour.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import delta, record
from .outline import MODULE, Line, outline

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

    @property
    def file(self) -> str:
        return self.symbol.partition(":")[0]


@dataclass(frozen=True)
class Stop:
    """An entry of `DELTA.toml`, its reason, and the symbols that it covers."""

    entry: str
    kind: str
    reason: str
    rung: str  # the milestone of this DELTA.toml
    parts: list[Part]


@dataclass
class Lesson:
    """All differences between two milestones."""

    below: str
    above: str
    stops: list[Stop]
    untouched: list[str] = field(default_factory=list)  # symbols that are the same in both


def lesson(below: str, above: str, root: Path = delta.ROOT) -> Lesson:
    """Return the lesson from one milestone to a higher one, through all milestones between them.

    Raises `ValueError` for a name that is no milestone, and for two milestones in the wrong order.
    """
    rungs = record.milestones(root)
    below, above = record.find_milestone(below, root), record.find_milestone(above, root)
    first, last = rungs.index(below), rungs.index(above)
    if first >= last:
        raise ValueError(f"{below} is not below {above}; name the lower milestone first")
    old, new = _sources(root / below), _sources(root / above)
    covered: set[str] = set()
    stops: list[Stop] = []
    differing = _differing(old, new)
    for rung in rungs[first + 1 : last + 1]:
        for entry, reason in delta.declared(rung, root).reasons.items():
            mine = {
                s: k for s, k in differing.items() if s not in covered and delta.covers(entry, s)
            }
            # An entry for an added class stands for its methods; one for a changed class does not.
            if ":" in entry and mine.get(entry) == "changed":
                mine = {entry: "changed"}
            covered |= mine.keys()
            if parts := _parts(entry, mine, old, new):
                stops.append(Stop(entry, _kind(parts), reason, rung, parts))
    for symbol, kind in differing.items():
        if symbol not in covered:
            parts = _parts(symbol, {symbol: kind}, old, new)
            stops.append(Stop(symbol, kind, UNDECLARED, above, parts))
    same = [f"{f}:{s}" for f in new for s in new[f] if f"{f}:{s}" not in differing]
    return Lesson(below, above, stops, same)


def choose(whole: Lesson, wanted: str) -> Lesson:
    """Return the stops and parts of a symbol (a full name or its end: `schedule`) or of a file.

    Raises `ValueError` that says that the symbol is unchanged, or which names are similar.
    """
    stops = []
    for stop in whole.stops:
        parts = [part for part in stop.parts if _named(part.symbol, wanted)]
        if _named(stop.entry, wanted) or delta.covers(stop.entry, wanted):
            parts = parts or stop.parts
        if parts:
            stops.append(Stop(stop.entry, stop.kind, stop.reason, stop.rung, parts))
    if stops:
        return Lesson(whole.below, whole.above, stops)
    if same := [symbol for symbol in whole.untouched if _named(symbol, wanted)]:
        raise ValueError(f"{same[0]} is the same in {whole.below} and {whole.above}")
    names = list(dict.fromkeys(part.symbol for stop in whole.stops for part in stop.parts))
    ends = {name.rpartition(":")[2].rpartition(".")[2]: name for name in names}
    last = wanted.rpartition(":")[2].rpartition(".")[2]
    near = [ends[end] for end in difflib.get_close_matches(last, ends, 4, 0.6)]
    near += difflib.get_close_matches(wanted, names, 4, 0.6)
    hint = ", ".join(list(dict.fromkeys(near))[:5] or sorted({n.partition(":")[0] for n in names}))
    raise ValueError(
        f"{whole.above} has no symbol {wanted!r} that differs from {whole.below}; similar: {hint}"
    )


def _named(symbol: str, wanted: str) -> bool:
    return delta.covers(wanted, symbol) or symbol.endswith((f":{wanted}", f".{wanted}"))


Sources = dict[str, dict[str, list[Line]]]  # file -> symbol -> lines


def _sources(folder: Path) -> Sources:
    return {
        name: outline(path.read_text(encoding="utf-8"))
        for name, path in delta.files(folder).items()
    }


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
        return [Part(entry, kind, [Block("change", *sides)])]
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
    codes = matcher.get_opcodes()
    for index, (tag, i, j, k, end) in enumerate(codes):
        if tag != "equal":
            yield Block("change", old[i:j], new[k:end])
            continue
        head = CONTEXT if index else 0
        tail = CONTEXT if index < len(codes) - 1 else 0
        if j - i <= head + tail + 1:
            yield Block("same", old[i:j], new[k:end])
            continue
        for kind, start, stop in (
            ("same", 0, head), ("fold", head, j - i - tail), ("same", j - i - tail, j - i),
        ):  # fmt: skip
            if start < stop:
                yield Block(kind, old[i + start : i + stop], new[k + start : k + stop])


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
