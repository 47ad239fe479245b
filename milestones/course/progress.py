"""What a student has done so far, in `.ladder/progress.json` of the tree; git ignores it.

It is a help, not a proof: grading runs the tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = ".ladder"


@dataclass
class Progress:
    """Exercises that have passed, in the order they did, and how many hints of each were given."""

    passed: list[str] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)


def load_progress(root: Path) -> Progress:
    """What the file says; nothing where there is none, or one that cannot be read."""
    try:
        data = json.loads((root / FOLDER / "progress.json").read_text(encoding="utf-8"))
        hints = {str(name): int(count) for name, count in data["hints"].items()}
        return Progress([str(name) for name in data["passed"]], hints)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Progress()


def save_progress(root: Path, progress: Progress) -> None:
    """Write the file, whole or not at all."""
    path = root / FOLDER / "progress.json"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def note_result(root: Path, exercise: str, passed: bool) -> None:
    """Remember that an exercise passes now, or does not."""
    progress = load_progress(root)
    if passed == (exercise in progress.passed):
        return
    if passed:
        progress.passed.append(exercise)
    else:
        progress.passed.remove(exercise)
    save_progress(root, progress)
