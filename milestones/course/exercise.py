"""`Exercise` and `Mutant`: one entry of a milestone's catalog, or one of its mutants, as data.

An exercise also finds the parts of its section in the handout: "Predict", "Break it".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..chain import course_place, place

ANSWER = re.compile(r"<details><summary>Answer</summary>\s*(.*?)\s*</details>", re.S)


@dataclass(frozen=True)
class Exercise:
    """One exercise, as it is in `exercises.toml`."""

    milestone: str
    id: str
    title: str
    points: int
    hours: float
    summary: str
    requires: tuple[str, ...]  # exercises of the same milestone that it needs directly
    symbols: tuple[str, ...]  # "scheduler.py:Scheduler.schedule": a release cuts these bodies
    tests: tuple[str, ...]  # node ids of pytest, or files, from the root
    hints: tuple[str, ...]  # three of them
    # What the handout's "Break it" does: the name of a mutant, the tests that fail, and whether
    # the answers of an engine are still "right", are "wrong", or the engine "stops".
    mistake: str = ""
    red: tuple[str, ...] = ()
    answers: str = ""

    @property
    def anchor(self) -> str:
        """The anchor of its section of the handout, which has the heading "m3.2: The title"."""
        return anchor_of(f"{self.id}: {self.title}")

    @property
    def section(self) -> str:
        """The path of its section of the handout."""
        return f"{course_place(self.milestone)}/README.md#{self.anchor}"

    @property
    def start(self) -> str:
        """The folder of its files as a release wrote them."""
        return f"{course_place(self.milestone)}/start"

    @property
    def sources(self) -> tuple[str, ...]:
        """The files of its symbols, from the root."""
        names = dict.fromkeys(symbol.partition(":")[0] for symbol in self.symbols)
        return tuple(f"{place(self.milestone)}/{name}" for name in names)

    def part(self, name: str, root: Path) -> tuple[str, str]:
        """Return the question of a part of its section, and its folded answer ("" if none)."""
        path = root / course_place(self.milestone) / "README.md"
        _, _, text = path.read_text(encoding="utf-8").partition(f"\n## {self.id}: ")
        _, _, text = text.partition("\n## ")[0].partition(f"**{name}.**")
        text = re.split(r"\n\*\*[A-Z][\w ]+\.\*\*", text, maxsplit=1)[0]
        answer = ANSWER.search(text)
        return text.partition("<details>")[0].strip(), answer[1] if answer else ""


@dataclass(frozen=True)
class Mutant:
    """A mistake or a wrong solution, as a patch, and the test that must fail with it."""

    milestone: str
    name: str
    exercise: str
    mistake: str
    killed_by: str
    patch: str  # a unified diff against the root


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
