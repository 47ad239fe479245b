"""Take the files of a submission, and make the trees in which it is graded.

Only the files that the exercises name come from the student, and Python files of the milestone that
the student has added. All others are the instructor's: the lower milestones and `common/` are
complete, the graded milestone is as released (so the tree has no solution), and the tests and their
helpers are the originals. Hidden tests are in a tree of their own.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ... import chain
from ...course import catalog
from ...course.exercise import Exercise
from ...course.release.student_tree import student_files
from .upload import NOT_LOOKED_AT, Upload, places_of, readable

LARGEST = 1 << 20  # bytes of a file
MOST_ADDED = 50  # files
HIDDEN = "tests/hidden"
QUESTIONS = "tests/questions.py"
LITTER = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


@dataclass
class Submission:
    """The files of one student, the reasons why files were refused, and notes on the others."""

    name: str
    files: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # file -> reason
    notes: list[str] = field(default_factory=list)

    def reasons(self, exercise: Exercise) -> list[str]:
        """Return why an exercise cannot be graded. Empty if it can be graded."""
        return [f"{f}: {self.refused[f]}" for f in exercise.sources if f in self.refused]

    @property
    def digest(self) -> str:
        """A number that changes with each file that is graded."""
        items = [repr(sorted(self.files.items())), repr(sorted(self.refused.items()))]
        return hashlib.sha256("\n".join(items).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Course:
    """The graded milestone: its exercises, their tests, and the templates of the trees."""

    milestone: str
    exercises: tuple[Exercise, ...]
    hidden: dict[str, tuple[str, ...]]  # exercise id -> files of hidden tests
    skeleton: dict[str, bytes]  # the released files that the exercises name
    released: dict[str, bytes]  # all files of a student's tree
    root: Path  # the instructor's tree
    template: Path
    template_hidden: Path | None  # the same with hidden tests, if there are any

    @property
    def names(self) -> list[str]:
        """The files that the exercises name, from the folder of the milestone."""
        return [file.removeprefix(f"{self.folder}/") for file in self.skeleton]

    @property
    def folder(self) -> str:
        """The folder of the milestone, from the root of a tree."""
        return chain.place(self.milestone)


def prepare(milestone: str, root: Path, target: Path, hidden: Path | None = None) -> Course:
    """Write the templates below `target`. Raises `ValueError` that says what is wrong."""
    exercises = catalog.load(milestone, root)
    files, _ = student_files(milestone, root)
    template = target / "template"
    for file, data in files.items():
        if not file.startswith("milestones/") or file.endswith(".py"):  # no catalog, no hints
            (template / file).parent.mkdir(parents=True, exist_ok=True)
            (template / file).write_bytes(data)
    tests = {test.partition("::")[0] for exercise in exercises for test in exercise.tests}
    for file in tests:
        (template / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, template / file)
    questions = root / "tests" / "questions" / f"{milestone}.py"
    if not questions.is_file():
        raise ValueError(f"{questions} is missing: the questions of {milestone} decide its points")
    shutil.copyfile(questions, template / QUESTIONS)
    owned: dict[str, tuple[str, ...]] = {}
    template_hidden = None
    if paths := _hidden_tests(hidden, exercises):
        private = Path(tempfile.mkdtemp(dir=target))  # no other user can enter it
        template_hidden = shutil.copytree(template, private / "template")
        (template_hidden / HIDDEN).mkdir(parents=True)
        (template_hidden / HIDDEN / "__init__.py").touch()
        for path in paths:
            shutil.copyfile(path, template_hidden / HIDDEN / path.name)
            if owner := _owner(path, exercises):
                owned[owner] = (*owned.get(owner, ()), f"{HIDDEN}/{path.name}")
    named = {source for exercise in exercises for source in exercise.sources}
    skeleton = {file: files[file] for file in sorted(named)}
    return Course(milestone, exercises, owned, skeleton, files, root, template, template_hidden)


def complete(course: Course, root: Path, template: Path, target: Path) -> Path:
    """Make a tree with the instructor's solutions."""
    shutil.copytree(template, target)
    shutil.rmtree(target / course.folder)
    shutil.copytree(root / course.folder, target / course.folder, ignore=LITTER)
    return target


def keep_compiled(course: Course, tree: Path) -> None:
    """Copy what Python compiled in the tree of the reference to the templates, so that not each
    test of each submission compiles it again. In the milestone, it is the solution."""
    for folder in tree.rglob("__pycache__"):
        inside = folder.relative_to(tree)
        if inside.parts[0] != course.milestone:
            for template in (course.template, course.template_hidden):
                if template is not None:
                    shutil.copytree(folder, template / inside, dirs_exist_ok=True)


def take(upload: Upload, course: Course) -> Submission:
    """Read the files of a submission. A link is refused: it could point to a solution."""
    submission = Submission(upload.name)
    places = [] if upload.problem else places_of(upload.folder, course.milestone, course.names)
    place, absent = next(iter(places), None), upload.problem or "the file is not there"
    for file in course.skeleton:
        data = _read(place, file.removeprefix(f"{course.folder}/")) if place else absent
        if isinstance(data, bytes):
            submission.files[file] = data
        else:
            submission.refused[file] = data
    if place is not None:
        expected = upload.folder / course.folder
        if place != expected:
            where = readable(str(place.relative_to(upload.folder)))
            submission.notes.append(f"the files were found in {where}, not in {course.folder}")
        submission.notes += [
            f"other files are in {readable(str(other.relative_to(upload.folder)))}: not graded"
            for other in places[1:]
        ]
        _take_added(place, course, submission)
        submission.notes += _ignored(place, course)
    return submission


def lay_out(submission: Submission, template: Path, target: Path) -> Path:
    """Make a tree of one submission: the template with the student's files."""
    shutil.copytree(template, target)
    for file, data in submission.files.items():
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_bytes(data)
    return target


def _take_added(place: Path, course: Course, submission: Submission) -> None:
    """Take the Python files that the student has added to the milestone."""
    files = [path.relative_to(place) for path in place.rglob("*.py")]
    folder, released = PurePosixPath(course.folder), course.released.keys()
    added = [
        file.as_posix()
        for file in sorted(files, key=lambda file: (len(file.parts), file))
        if not any(NOT_LOOKED_AT.match(folder) for folder in file.parts[:-1])
        and not file.name.startswith(".")
        and not {str(path) for path in (folder / file, *(folder / file).parents)} & released
    ]
    for name in added[:MOST_ADDED]:
        data = _read(place, name)
        if isinstance(data, bytes):
            submission.files[f"{course.folder}/{name}"] = data
        submission.notes.append(
            f"{readable(name)} was added by the student"
            + ("" if isinstance(data, bytes) else f", and not used: {data}")
        )
    if more := len(added) - MOST_ADDED:
        submission.notes += [f"{more} more files were added, and not used"] if more > 0 else []


def _ignored(place: Path, course: Course) -> list[str]:
    """Return which released files the student has changed although no exercise names them."""
    changed = []
    for file, released in course.released.items():
        in_milestone = file.startswith(f"{course.folder}/")
        if not file.endswith(".py") or file in course.skeleton:
            continue
        if in_milestone:
            data = _read(place, file.removeprefix(f"{course.folder}/"))
        else:
            root = place.parents[course.folder.count("/")]
            data = _read(root, file) if place.name == course.milestone else ""
        own = _read(course.root, file)  # a release leaves some tests out of a file
        if isinstance(data, bytes) and data.split() not in (own.split(), released.split()):
            changed.append(file)
    return [f"{file} was changed, and this change is not graded" for file in changed]


def _read(folder: Path, file: str) -> bytes | str:
    """Return the content of a file, or the reason why there is none."""
    path = folder
    try:
        for part in Path(file).parts:
            path = path / part
            if path.is_symlink():
                return f"{path.relative_to(folder)} is a link; submit the file itself"
        if not path.exists():
            return "the file is not in the submission"
        information = path.stat()
        if not stat.S_ISREG(information.st_mode):
            return "this is not a regular file"
        if information.st_size > LARGEST:
            return f"the file is larger than {LARGEST >> 10} KB"
        return path.read_bytes()
    except OSError as error:
        return f"the file cannot be read: {error.strerror}"


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
