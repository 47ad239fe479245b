"""Say where the course treats a symbol: its exercise, the slides that show it, and its tests.

All of it is derived from the catalogs of exercises, the mutants and the decks. A student's tree has
fewer of them, and so fewer pointers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...chain import place
from .. import catalog
from ..decks import code_slides
from ..exercise import Exercise, Mutant
from ..outline import symbol_at
from .lesson import Lesson


@dataclass(frozen=True)
class Pointer:
    """A place that treats a symbol."""

    kind: str  # Exercise, Slide, Tests
    words: str
    target: str  # a path from the root, perhaps with an anchor; the file may not exist
    details: str = ""


def pointers(lesson: Lesson, root: Path) -> dict[str, list[Pointer]]:
    """Return the pointers of each symbol of a lesson: exercises first, then slides, then tests."""
    found: dict[str, dict[Pointer, None]] = {}
    slides = list(code_slides(root))
    for milestone in lesson.milestones:
        exercises = _exercises(milestone, root)
        for exercise in exercises:
            for symbol in exercise.symbols:
                words = f"{exercise.id} {exercise.title}"
                pointer = Pointer("Exercise", words, exercise.section)
                found.setdefault(symbol, {})[pointer] = None
        for slide in slides:
            for shown in slide.places:
                if shown.startswith(f"{place(milestone)}/"):
                    words = f"{slide.number} of {slide.deck}: {slide.title}"
                    symbol = shown.removeprefix(f"{place(milestone)}/")
                    found.setdefault(symbol, {})[Pointer("Slide", words, slide.built)] = None
        for symbol, pointer in _tests(milestone, exercises, root):
            found.setdefault(symbol, {})[pointer] = None
    return {symbol: list(places) for symbol, places in found.items()}


def broken_symbols(mutant: Mutant, root: Path) -> set[str]:
    """Return the symbols that a mutant changes. Its hunks apply by their lines, at any number."""
    file = re.findall(r"^\+\+\+ b/(\S+)$", mutant.patch, re.MULTILINE)[0]
    text = (root / file).read_text(encoding="utf-8")
    found = set()
    for hunk in re.split(r"^@@ .*\n", mutant.patch, flags=re.MULTILINE)[1:]:
        rows = hunk.splitlines()
        old = "\n".join(row[1:] for row in rows if not row.startswith("+"))
        before, is_there, _ = f"\n{text}".partition(f"\n{old}\n")
        first = next(n for n, row in enumerate(rows) if row.startswith(("+", "-")))
        if is_there:
            # A line that is only added belongs to the symbol of the line above it.
            number = before.count("\n") + 1 + first - rows[first].startswith("+")
            name = symbol_at(text, number)
            found.add(f"{file.removeprefix(f'{place(mutant.milestone)}/')}:{name}")
    return found


def _exercises(milestone: str, root: Path) -> tuple[Exercise, ...]:
    is_taught = catalog.path_of(milestone, root).exists()
    return catalog.load(milestone, root, strict=False) if is_taught else ()


def _tests(
    milestone: str, exercises: tuple[Exercise, ...], root: Path
) -> Iterator[tuple[str, Pointer]]:
    """Yield the tests that fail if a symbol is wrong: each kills a mutant of the symbol.

    Without such a test, these are the tests of the symbol's exercise.
    """
    killers: dict[str, dict[str, None]] = {}
    if catalog.patches_of(milestone, root).exists():
        for mutant in catalog.mutants(milestone, root):
            for symbol in sorted(broken_symbols(mutant, root)):
                killers.setdefault(symbol, {})[mutant.killed_by] = None
    for exercise in exercises:
        for symbol in exercise.symbols:
            killers.setdefault(symbol, dict.fromkeys(exercise.tests))
    for symbol, tests in killers.items():
        names: dict[str, list[str]] = {}
        for test in tests:
            file, _, name = test.partition("::")
            names.setdefault(file, []).extend(filter(None, [name]))
        for file, ids in names.items():
            yield symbol, Pointer("Tests", Path(file).name, file, ", ".join(ids))
