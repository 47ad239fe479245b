"""Take the files of a submission, and make the tree in which it is graded.

Only the files that the exercises name come from the student. All others are the instructor's: the
lower milestones and `common/` are complete, the graded milestone is as released (so the tree has no
solution), and the tests and their helpers are the originals, with the hidden tests.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .. import record
from ..exercise import Exercise
from ..release.student_tree import student_files
from . import static_checks

LARGEST = 1 << 20  # bytes of a file
HIDDEN = "tests/hidden"
LITTER = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


@dataclass
class Submission:
    """The files of one student as text, and the reasons why files were refused."""

    name: str
    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)  # file -> reasons

    def reasons(self, exercise: Exercise) -> list[str]:
        """Return why an exercise cannot be graded. Empty if it can be graded."""
        found = [(f, reason) for f in exercise.sources for reason in self.refused.get(f, ())]
        return [f"{file}: {reason}" for file, reason in found]


@dataclass(frozen=True)
class Course:
    """The graded milestone: its exercises, their tests, and the template of a tree."""

    milestone: str
    exercises: tuple[Exercise, ...]
    tests: dict[str, tuple[str, ...]]  # exercise id -> files and node ids, hidden tests last
    skeleton: dict[str, str]  # the files that the exercises name, as released
    template: Path


def prepare(milestone: str, root: Path, target: Path, hidden: Path | None = None) -> Course:
    """Write the template of all trees to `target`. Raises `ValueError` that says what is wrong."""
    exercises = record.load(milestone, root)
    files, _ = student_files(milestone, root)
    for file, data in files.items():
        if not file.startswith("milestones/") or file.endswith(".py"):  # no record, no hints
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            (target / file).write_bytes(data)
    for file in {test.partition("::")[0] for exercise in exercises for test in exercise.tests}:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, target / file)
    tests = {exercise.id: exercise.tests for exercise in exercises}
    for path in _hidden_tests(hidden, exercises):
        (target / HIDDEN).mkdir(parents=True, exist_ok=True)
        (target / HIDDEN / "__init__.py").touch()
        shutil.copyfile(path, target / HIDDEN / path.name)
        if owner := _owner(path, exercises):
            tests[owner] = (*tests[owner], f"{HIDDEN}/{path.name}")
    named = {source for exercise in exercises for source in exercise.sources}
    skeleton = {file: files[file].decode() for file in sorted(named)}
    return Course(milestone, exercises, tests, skeleton, target)


def complete(course: Course, root: Path, target: Path) -> Path:
    """Make a tree with the instructor's solutions, to collect the tests."""
    shutil.copytree(course.template, target)
    shutil.rmtree(target / course.milestone)
    shutil.copytree(root / course.milestone, target / course.milestone, ignore=LITTER)
    return target


def take(folder: Path, name: str, course: Course, allowed: Collection[str] = ()) -> Submission:
    """Read the named files of a submission. A link is refused: it could point to a solution."""
    submission = Submission(name, folder)
    for file, released in course.skeleton.items():
        text, reasons = _read(folder, file)
        if text is not None and not reasons:
            reasons = static_checks.problems(text, released, allowed)
        if reasons:
            submission.refused[file] = reasons
        elif text is not None:
            submission.files[file] = text
    return submission


def lay_out(submission: Submission, course: Course, target: Path) -> Path:
    """Make the tree of one submission: the template with the student's files."""
    shutil.copytree(course.template, target)
    for file, text in submission.files.items():
        (target / file).write_text(text, encoding="utf-8")
    return target


def _read(folder: Path, file: str) -> tuple[str | None, list[str]]:
    path = folder
    for part in Path(file).parts:
        path = path / part
        if path.is_symlink():
            return None, [f"{path.relative_to(folder)} is a link; submit the file itself"]
    if not path.exists():
        return None, ["the file is not in the submission"]
    information = path.stat()
    if not stat.S_ISREG(information.st_mode):
        return None, ["this is not a regular file"]
    if information.st_size > LARGEST:
        return None, [f"the file is larger than {LARGEST >> 10} KB"]
    try:
        return path.read_text(encoding="utf-8"), []
    except UnicodeDecodeError as error:
        return None, [f"the file is not UTF-8: {error.reason} at byte {error.start}"]


def _hidden_tests(hidden: Path | None, exercises: Iterable[Exercise]) -> list[Path]:
    if hidden is None:
        return []
    if not hidden.is_dir():
        raise ValueError(f"{hidden}: there is no such folder of hidden tests")
    paths = sorted(hidden.glob("*.py"))
    strangers = [p.name for p in paths if p.name.startswith("test_") and not _owner(p, exercises)]
    if strangers:
        ids = ", ".join(exercise.id for exercise in exercises)
        raise ValueError(
            f"{hidden}: {', '.join(strangers)} belongs to none of {ids}; "
            f"a file of exercise m3.2 is named test_m3_2*.py"
        )
    return paths


def _owner(path: Path, exercises: Iterable[Exercise]) -> str | None:
    """Return the exercise of a file named test_m3_2*.py. test_m3_21.py belongs to m3.21."""
    match = re.match(r"test_m(\d+)_(\d+)(?!\d)", path.name)
    name = f"m{match[1]}.{match[2]}" if match else None
    return name if name in [exercise.id for exercise in exercises] else None
