"""Find out if an error was raised by the student's own code, or by given code that it called."""

from __future__ import annotations

from pathlib import Path

from ...chain import place
from ..exercise import Exercise
from ..outline import outline, symbol_at
from ..testing.results import Failure


def caller_of(failure: Failure | None, own: tuple[Exercise, ...], root: Path) -> str | None:
    """Return the student's function that called the given code which failed; "" if none did so.

    None: the student's own code failed, or nothing is known. `own` has all exercises of the
    milestone.
    """
    if failure is None or not failure.calls:
        return None
    written = {
        f"{place(exercise.milestone)}/{symbol}" for exercise in own for symbol in exercise.symbols
    }
    starts = root / own[0].start
    for call in reversed(failure.calls):
        path, _, line = call.partition(" in ")[0].rpartition(":")
        symbol = symbol_at((root / path).read_text(encoding="utf-8"), int(line))
        start = starts / f"{path.removeprefix(place(own[0].milestone) + '/')}.txt"
        is_new = start.is_file() and symbol not in outline(start.read_text(encoding="utf-8"))
        if is_new or f"{path}:{symbol}" in written:
            return None if call == failure.calls[-1] else symbol.rpartition(".")[2]
    return ""
