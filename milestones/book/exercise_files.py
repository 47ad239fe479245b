"""What a tab needs for the exercises: a student's tree, pytest, and what checks them.

The tree is that of `release`, for all milestones at once: their files with the bodies cut, their
catalogs and starting states. Of the tests and of `common/` it has what the tests import. pytest and
what it needs come from this environment. Their versions are those of `constraints.txt`.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from pathlib import Path

from ..chain import ROOT, course_place, milestones, place
from ..course.catalog import load
from ..course.exercise import Exercise
from ..course.release.cut import cut
from ..course.release.student_tree import told
from .browser_files import BookError, imported_files, of_repository, write_zip

# The exercises of plain data. `tests/house/test_plain_data.py` knows them, those of electives too.
IN_A_TAB = (
    "m1.1", "m2.1", "m2.2", "m2.3", "m3.1", "m3.3", "m3.4", "m4.1", "m4.2", "m4.3", "m4.4", "m4.5",
    "m5.3",
)  # fmt: skip
WHOLE = ("pytest", "pluggy")  # packages that import their parts late
LIBRARIES = (*WHOLE, "iniconfig", "packaging", "pygments")
TEST_ALL = """
import milestones.book.workbench
import os, pytest
from milestones.course.testing.probe import Probe
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
plugins = [Probe(lambda event: None, milestones.book.workbench.TREE)]
options = [*milestones.book.workbench.OPTIONS, "--rootdir", {root!r}]
if pytest.main([*options, *{tests!r}], plugins=plugins):
    sys.exit("a test of the exercises fails")
"""


@cache
def exercises() -> tuple[Exercise, ...]:
    """Return the exercises that a reader can do in a tab, in order."""
    found = [exercise for name in milestones() for exercise in load(name)]
    return tuple(exercise for exercise in found if exercise.id in IN_A_TAB)


def tree(own: list[str]) -> dict[str, bytes]:
    """Return a student's tree, as far as a tab needs it. own: the files that the tests import."""
    found = {
        name: (ROOT / name).read_bytes() for name in own if name.startswith(("common/", "tests/"))
    }
    for milestone in dict.fromkeys(exercise.milestone for exercise in exercises()):
        found |= milestone_files(milestone)
    return found


def milestone_files(milestone: str) -> dict[str, bytes]:
    """Return the files of a milestone as `release` writes them: sources, starts and catalog.

    `release` also chooses tests and pages, which takes seconds, and which a tab does not need.
    """
    own, course = place(milestone), course_place(milestone)
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for folder in ("common", "tests", own, course)
        for pattern in ("*.py", "*.md", "*.toml") for path in (ROOT / folder).rglob(pattern)
    }  # fmt: skip
    all_exercises = load(milestone)
    done = cut(milestone, all_exercises, ROOT, told(milestone, all_exercises, texts)).files
    found = {name: data for name, data in texts.items() if name.startswith(f"{own}/")}
    found |= {name: text.encode() for name, text in done.items()}
    found[f"{course}/exercises.toml"] = texts[f"{course}/exercises.toml"]
    for source in {source for exercise in all_exercises for source in exercise.sources}:
        found[f"{course}/start/{source.removeprefix(f'{own}/')}.txt"] = found[source]
    return found


def imported() -> list[Path]:
    """Return the files that the tests of the exercises import, and those of the workbench."""
    tests = [str(ROOT / test) for exercise in exercises() for test in exercise.tests]
    return imported_files(TEST_ALL.format(root=str(ROOT), tests=tests))


def libraries(files: list[Path]) -> dict[str, bytes]:
    """Return the files of pytest and of what it needs, with their licences."""
    found = {}
    for name in LIBRARIES:
        distribution = metadata.distribution(name)
        if distribution.files is None:
            raise BookError(f"the files of {name} are not known: install it with pip")
        for file in distribution.files:
            path = Path(os.path.normpath(str(distribution.locate_file(file))))
            whole = name in WHOLE and file.suffix == ".py"
            licence = "licenses" in file.parts and ".dist-info" in file.parts[0]
            if whole or path in files or licence:
                found[file.as_posix()] = path.read_bytes()
    return found


class ExerciseFiles:
    """The files of the exercises in a tab. `tree` has those of the student, by path."""

    def __init__(self) -> None:
        files = imported()
        own = [name for name in map(of_repository, files) if name]
        self.tree = tree(own)
        self.checking = {
            name: (ROOT / name).read_bytes() for name in own if name.startswith("milestones/")
        }
        self.libraries = libraries(files)

    def write(self, path: Path) -> None:
        """Write the zip that a worker unpacks."""
        in_tree = {f"tree/{name}": data for name, data in self.tree.items()}
        write_zip(path, {**self.checking, **self.libraries, **in_tree})

    def start(self, path: str) -> str:
        """Return a file of an exercise as a release writes it. path: from the root."""
        return self.tree[path].decode()
