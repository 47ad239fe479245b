"""The progress of a student, in `.ladder/progress.json` of the tree. Git ignores this file.

The file is only a help and proves nothing: grading runs the tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = ".ladder"
ANSWERS = f"{FOLDER}/answers.json"  # the answers of an engine, for `break`


@dataclass
class Progress:
    """What the last check of each exercise has found, and how many hints of it were shown.

    An exercise that was not checked yet, or that was reset, is in neither list.
    """

    passed: list[str] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def load_progress(root: Path) -> Progress:
    """Read the file. Returns no progress if there is no file, or if it cannot be read."""
    try:
        data = json.loads((root / FOLDER / "progress.json").read_text(encoding="utf-8"))
        hints = {str(name): int(count) for name, count in data["hints"].items()}
        passed, failed = data["passed"], data.get("failed", [])
        return Progress([str(name) for name in passed], hints, [str(name) for name in failed])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Progress()


def save_progress(root: Path, progress: Progress) -> None:
    """Write the file completely or not at all."""
    path = root / FOLDER / "progress.json"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def note_result(root: Path, exercise: str, passed: bool | None) -> None:
    """Remember whether an exercise passes now. None: it is not known any more."""
    progress = load_progress(root)
    for there, names in ((passed is True, progress.passed), (passed is False, progress.failed)):
        if there and exercise not in names:
            names.append(exercise)
        elif not there and exercise in names:
            names.remove(exercise)
    save_progress(root, progress)
