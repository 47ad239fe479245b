"""Trees of this repository with some exercises cut, for proofs: written fast, thrown away."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from .cut import cut
from .record import load, milestones
from .student_tree import student_files, told

LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "*.pyc", "*.png", "node_modules")


class Stages:
    """The trees that a student of a rung goes through, from nothing solved to all."""

    def __init__(self, milestone: str, root: Path) -> None:
        self.milestone = milestone
        self.root = root
        self.exercises = load(milestone, root)
        self.files, _ = student_files(milestone, root)
        self.told = told(milestone, self.exercises, self.files)
        for path in (root / milestone).rglob("*.py"):
            self.files[path.relative_to(root).as_posix()] = path.read_bytes()

    def write(self, solved: Collection[str], into: Path) -> Path:
        """The tree with the exercises in `solved` solved, and the others cut; returns `into`."""
        left = [exercise for exercise in self.exercises if exercise.id not in solved]
        changed = cut(self.milestone, left, self.root, self.told).files
        for name, data in self.files.items():
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
