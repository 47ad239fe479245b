"""The progress of a student, in `.ladder/progress.json` of the tree. Git ignores this file.

The file is only a help and proves nothing: grading runs the tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = ".ladder"


@dataclass
class Progress:
    """Exercises that have passed, in that order, and how many hints of each were shown."""

    passed: list[str] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)


def load_progress(root: Path) -> Progress:
    """Read the file. Returns no progress if there is no file, or if it cannot be read."""
    try:
        data = json.loads((root / FOLDER / "progress.json").read_text(encoding="utf-8"))
        hints = {str(name): int(count) for name, count in data["hints"].items()}
        return Progress([str(name) for name in data["passed"]], hints)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Progress()


def save_progress(root: Path, progress: Progress) -> None:
    """Write the file completely or not at all."""
    path = root / FOLDER / "progress.json"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def note_result(root: Path, exercise: str, passed: bool) -> None:
    """Remember whether an exercise passes now."""
    progress = load_progress(root)
    if passed == (exercise in progress.passed):
        return
    if passed:
        progress.passed.append(exercise)
    else:
        progress.passed.remove(exercise)
    save_progress(root, progress)
