"""Write temporary trees of this repository with some exercises cut, for the proofs."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ...chain import milestones, place
from ..record import load
from .cut import cut
from .student_tree import student_files, told

LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "*.pyc", "*.png", "node_modules")


class Stages:
    """The trees of a student's progress in a milestone, from no exercise solved to all of them."""

    def __init__(self, milestone: str, root: Path) -> None:
        self.milestone = milestone
        self.root = root
        self.exercises = load(milestone, root)
        self.files, _ = student_files(milestone, root)
        self.told = told(milestone, self.exercises, self.files)
        for path in (root / place(milestone)).rglob("*.py"):
            self.files[path.relative_to(root).as_posix()] = path.read_bytes()

    def write(self, solved: Collection[str], into: Path) -> Path:
        """Write a tree with the exercises in `solved` solved and the others cut. Returns `into`."""
        left = [exercise for exercise in self.exercises if exercise.id not in solved]
        changed = cut(self.milestone, left, self.root, self.told).files
        for name, data in self.files.items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(changed[name].encode() if name in changed else data)
        return into


def whole(into: Path, root: Path) -> Path:
    """Copy all that the tests run on: engines, `common/`, `tests/`, `milestones/`, settings."""
    for name in ("common", "tests", "milestones", *milestones(root)):
        shutil.copytree(root / name, into / name, ignore=LEFT_OUT)
    shutil.copyfile(root / "pyproject.toml", into / "pyproject.toml")
    return into
