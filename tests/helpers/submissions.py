"""Submissions to the small course of `mini_course`, and how they are graded."""

from __future__ import annotations

import argparse
import csv
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from filelock import FileLock

from milestones.course.release.student_tree import student_files
from milestones.staff.grading import command as grade
from tests.helpers import mini_course

SECONDS = "10"  # the limit of a test; one that does not hang takes a fraction of a second
SOURCE = "m2_mini/shelf.py"
Made = TypeVar("Made")
Content = str | bytes | Path


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
    first = mini_course.CATALOG.split("[[exercise]]")[1]
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


def zipped(target: Path, files: Mapping[str, Content]) -> Path:
    """Write a zip file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content.read_bytes() if isinstance(content, Path) else content)
    return target


def results(folder: Path) -> dict[str, Any]:
    """Return the results of one submission."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def rows(out: Path) -> list[dict[str, str]]:
    """Return the rows of the table of all grades."""
    with (out / "grades.csv").open() as file:
        return list(csv.DictReader(file))


class Graded:
    """Submissions by name, and others by path, with their sheets and what the grader wrote."""

    def __init__(
        self, folder: Path, sources: Mapping[str, str | bytes], *words: str,
        course: Path | None = None, paths: Iterable[Path] = (),
    ) -> None:  # fmt: skip
        course = course or make_course(folder / "course")
        paths = [*paths, *(hand_in(folder / "given" / name, sources[name]) for name in sources)]
        self.out = folder / "out"
        words = (*map(str, paths), "--out", str(self.out), "--jobs", "2", *words)
        batch = grade.Batch(arguments(course, *words))
        batch.run()
        self.sheets, self.status = batch.sheets, batch.status

    def output(self, name: str) -> str:
        """Return all that a student reads."""
        data = results(self.out / name)
        return "\n".join([data["output"], *(test["output"] for test in data["tests"])])
