"""Submissions to the small course of `mini_course`, and how they are graded."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

from milestones.course.release.student_tree import student_files
from milestones.staff.grading import command as grade
from tests.helpers import mini_course

SECONDS = "10"  # the limit of a test; one that does not hang takes a fraction of a second
SOURCE = "m2_mini/shelf.py"
Made = TypeVar("Made")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """Return what `make` returns for a new folder. All workers of pytest-xdist share it: the tests
    of a module may be in several workers, and to grade takes long."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with FileLock(root / f"{name}.lock"):
        made = root / f"{name}.pickle"
        if not made.exists():
            (root / name).mkdir(exist_ok=True)
            made.write_bytes(pickle.dumps(make(root / name)))
        result: Made = pickle.loads(made.read_bytes())
        return result


def make_course(root: Path) -> Path:
    """Write the small course with its first exercise only. Return `root`."""
    mini_course.make(root)
    first = mini_course.RECORD.split("[[exercise]]")[1]
    (root / "milestones/m2_mini/exercises.toml").write_text(f"[[exercise]]{first}")
    return root


def skeleton_of(course: Path) -> str:
    """Return the source file that a student is given."""
    return student_files("m2_mini", course)[0][SOURCE].decode()


def hand_in(folder: Path, text: str | bytes) -> Path:
    (folder / SOURCE).parent.mkdir(parents=True)
    (folder / SOURCE).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def arguments(course: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    grade.add_arguments(parser)
    args = parser.parse_args(["--milestone", "m2", "--seconds", SECONDS, *words])
    args.root, args.bare = course, True  # no torch is needed here
    return args
