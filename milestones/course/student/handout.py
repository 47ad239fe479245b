"""The parts of an exercise's section in the handout: "Predict", "Break it", "Checkpoint"."""

from __future__ import annotations

import re
from pathlib import Path

from ...chain import course_place
from ..exercise import Exercise

ANSWER = re.compile(r"<details><summary>Answer</summary>\s*(.*?)\s*</details>", re.S)


def section(exercise: Exercise, root: Path) -> str:
    """Return the section of an exercise, without its heading."""
    path = root / course_place(exercise.milestone) / "README.md"
    _, _, text = path.read_text(encoding="utf-8").partition(f"\n## {exercise.id}: ")
    return text.partition("\n## ")[0].partition("\n")[2]


def part(name: str, exercise: Exercise, root: Path) -> tuple[str, str]:
    """Return the question of a part, and its folded answer ("" if it has none)."""
    _, _, text = section(exercise, root).partition(f"**{name}.**")
    text = re.split(r"\n\*\*[A-Z][\w ]+\.\*\*", text, maxsplit=1)[0]
    answer = ANSWER.search(text)
    return text.partition("<details>")[0].strip(), answer[1] if answer else ""
