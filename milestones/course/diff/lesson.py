"""The lesson between two milestones as a tour: for each difference its reason and the code.

The tour has the entries of `DELTA.toml`, in its reading order. Unchanged code is in no entry. Code
that was only moved is named and not shown. Differences that are not declared (comments, layout)
come last, so every difference is in the tour. `DELTA.toml` may divide a large tour into stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...chain import chain, find_pair
from .. import delta
from .parts import Part, differing, parts_of, sources_of

UNDECLARED = "undeclared difference: comments or layout"


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
    teaches: str = ""  # in a sentence

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
    notes: dict[str, str] = field(default_factory=dict)  # on symbols of files that were added
    milestones: list[str] = field(
        default_factory=list
    )  # that the lesson goes through, without the lowest

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
    old, new = sources_of(below, root), sources_of(above, root)
    covered: set[str] = set()
    entries: list[Entry] = []
    notes: dict[str, str] = {}
    kinds = differing(old, new)
    milestones = [*lower[lower.index(below) + 1 :], above]
    for milestone in milestones:
        says = delta.declared(milestone, root)
        notes |= says.notes
        for entry, reason in says.reasons.items():
            mine = {s: k for s, k in kinds.items() if s not in covered and delta.covers(entry, s)}
            # An entry for an added class stands for its methods; one for a changed class does not.
            if ":" in entry and mine.get(entry) == "changed":
                mine = {entry: "changed"}
            covered |= mine.keys()
            if parts := parts_of(entry, mine, old, new):
                entries.append(Entry(entry, _kind(parts), reason, milestone, parts))
    for symbol, kind in kinds.items():
        if symbol not in covered:
            parts = parts_of(symbol, {symbol: kind}, old, new)
            entries.append(Entry(symbol, kind, UNDECLARED, above, parts))
    same = [f"{f}:{s}" for f in new for s in new[f] if f"{f}:{s}" not in kinds]
    # The stops of a milestone divide the tour from the milestone below it, and no longer tour.
    is_divided = below == lower[-1] and bool(says.stops)
    stops = _stops(entries, says) if is_divided else [Stop(1, "", entries)]
    return Lesson(below, above, stops, same, notes, milestones)


def _stops(entries: list[Entry], says: delta.Delta) -> list[Stop]:
    """Return the entries in their stops. The last stop has the entries that no other has."""
    title_of = {name: title for title, names in says.stops.items() for name in names}
    teaches = {**says.teaches, delta.REST: delta.REST_TEACHES}
    stops = []
    for number, title in enumerate([*says.stops, delta.REST], start=1):
        if mine := [entry for entry in entries if title_of.get(entry.name, delta.REST) == title]:
            stops.append(Stop(number, title, mine, teaches[title]))
    return stops


def _kind(parts: list[Part]) -> str:
    kinds = {part.kind for part in parts}
    return kinds.pop() if len(kinds) == 1 else "changed"
