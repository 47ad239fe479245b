"""Trees of this repository with some exercises cut, for proofs: written fast, thrown away."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from .cut import cut
from .record import load, milestones
from .student_tree import student_files, told

LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "*.pyc", "*.png", "node_modules")


def partly_solved(milestone: str, solved: Iterable[str], into: Path, root: Path) -> Path:
    """The student's tree for a rung with the exercises in `solved` solved; returns `into`."""
    files, _ = student_files(milestone, root)
    exercises = load(milestone, root)
    left = [exercise for exercise in exercises if exercise.id not in set(solved)]
    reference = {
        f"{milestone}/{path.name}": path.read_bytes() for path in (root / milestone).glob("*.py")
    }
    changed = cut(milestone, left, root, told(milestone, exercises, files)).files
    for name, data in {**files, **reference}.items():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(changed[name].encode() if name in changed else data)
    return into


def whole(into: Path, root: Path) -> Path:
    """All that tests run on: the rungs, `common/`, `tests/`, `milestones/`, the configuration."""
    for name in ("common", "tests", "milestones", *milestones(root)):
        shutil.copytree(root / name, into / name, ignore=LEFT_OUT)
    shutil.copyfile(root / "pyproject.toml", into / "pyproject.toml")
    return into
