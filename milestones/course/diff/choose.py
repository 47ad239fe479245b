"""Choose a part of a lesson: a stop, a symbol or a file. Find the stop of a symbol."""

from __future__ import annotations

import difflib
from dataclasses import replace

from .. import delta
from .lesson import Lesson, Stop


def choose_stop(whole: Lesson, wanted: str) -> Lesson:
    """Return one stop of a lesson, by its number or by a part of its title, in any case.

    Raises `ValueError` that lists the stops, or says that the lesson is not divided.
    """
    if not whole.is_divided:
        raise ValueError(
            f"{whole.below} to {whole.above} has no stops: leave --stop out; only a milestone and "
            "the one below it can have stops, which DELTA.toml declares"
        )
    found = [stop for stop in whole.stops if str(stop.number) == wanted.strip()]
    if not found and not wanted.strip().isdecimal():
        found = [stop for stop in whole.stops if wanted.strip().lower() in stop.title.lower()]
    if len(found) != 1:
        problem = "several stops have" if found else "no stop has"
        what = "this number" if wanted.strip().isdecimal() else "this in the title"
        names = "; ".join(f"{stop.number} {stop.title}" for stop in whole.stops)
        raise ValueError(f"--stop {wanted!r}: {problem} {what}; choose one of: {names}")
    return replace(whole, stops=found)


def stop_of(symbol: str, whole: Lesson) -> Stop | None:
    """Return the stop with the entry that stands most closely for a symbol, or None."""
    places = [
        (len(entry.name), stop.number, stop)
        for stop in whole.stops
        for entry in stop.entries
        if delta.covers(entry.name, symbol)
    ]
    return max(places, key=lambda place: place[:2])[2] if places else None


def choose(whole: Lesson, wanted: str) -> Lesson:
    """Return the entries and parts of a symbol (a full name or its end: `schedule`) or of a file.

    Raises `ValueError` that says that the symbol is unchanged, or which names are similar.
    """
    entries = []
    for entry in whole.entries:
        parts = [part for part in entry.parts if _named(part.symbol, wanted)]
        if _named(entry.name, wanted) or delta.covers(entry.name, wanted):
            parts = parts or entry.parts
        if parts:
            entries.append(replace(entry, parts=parts))
    if entries:
        return replace(whole, stops=[Stop(1, "", entries)])
    if same := [symbol for symbol in whole.untouched if _named(symbol, wanted)]:
        raise ValueError(f"{same[0]} is the same in {whole.below} and {whole.above}")
    names = list(dict.fromkeys(part.symbol for entry in whole.entries for part in entry.parts))
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
