"""The lesson between two rungs, as stops of a tour: a reason, and the code that differs.

A stop is an entry of `DELTA.toml`, in the order in which it stands there. What is unchanged is in
no stop; what has only moved is named and not shown; what differs and is not declared (comments,
layout) comes last, so that nothing is hidden that is not the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import delta
from . import record
from .outline import MODULE, Line, outline

CONTEXT = 3  # unchanged lines around a change
REWRITTEN = 0.3  # below this likeness, the old text and the new one are shown whole
UNDECLARED = "differs, and is not declared: comments or layout"


@dataclass(frozen=True)
class Block:
    """Lines of both sides that stand beside each other.

    `same`: equal on both sides. `fold`: the same, and far from any change. `change`: of the rung
    below, of the one above, or of both.
    """

    kind: str
    old: list[Line]
    new: list[Line]


@dataclass(frozen=True)
class Part:
    """What became of one symbol (or of a whole file or class that was added or removed)."""

    symbol: str
    kind: str  # added, changed, removed
    blocks: list[Block]
    moved: str | None = None  # where the same text stands on the other side

    @property
    def file(self) -> str:
        return self.symbol.partition(":")[0]


@dataclass(frozen=True)
class Stop:
    """An entry of `DELTA.toml`, its reason, and what it covers."""

    entry: str
    kind: str
    reason: str
    rung: str  # whose DELTA.toml says so
    parts: list[Part]


@dataclass
class Lesson:
    """All that differs between two rungs of the ladder."""

    below: str
    above: str
    stops: list[Stop]
    untouched: list[str] = field(default_factory=list)  # symbols that are the same in both


def lesson(below: str, above: str, root: Path = delta.ROOT) -> Lesson:
    """The lesson from one rung to a higher one; of several steps, if others lie between.

    Raises `ValueError` for names that are no rungs, and for rungs in the wrong order.
    """
    rungs = record.milestones(root)
    below, above = record.find_milestone(below, root), record.find_milestone(above, root)
    first, last = rungs.index(below), rungs.index(above)
    if first >= last:
        raise ValueError(f"{below} is not below {above}; name the lower rung first")
    old, new = _sources(root / below), _sources(root / above)
    covered: set[str] = set()
    stops: list[Stop] = []
    differing = _differing(old, new)
    for rung in rungs[first + 1 : last + 1]:
        for entry, reason in delta.declared(rung, root).reasons.items():
            mine = {
                s: k for s, k in differing.items() if s not in covered and delta.covers(entry, s)
            }
            # An added class stands for its methods; a changed one for itself alone.
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
    """The stops and parts of one symbol: in full, by its end (`schedule`), or a whole file.

    Raises `ValueError` that says whether the lesson leaves it as it is, or which names are near.
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
        f"{whole.above} has no symbol {wanted!r} that differs from {whole.below}; near: {hint}"
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
    """Each symbol whose text differs, and how; in the order of the files above, then below."""
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
    """A whole file or class, added or removed, is one part; otherwise each symbol is."""
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
    """Whether a file or class exists on one side only."""
    file, _, name = entry.partition(":")
    before, after = (name in s.get(file, {}) if name else file in s for s in (old, new))
    return before != after


def _moved_to(symbol: str, lines: list[Line], other: Sources) -> str | None:
    """The symbol of the same name and text that stands elsewhere on the other side."""
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
    """Blank lines put back where neighbours do not touch."""
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
