"""The root of an exam: an environment behind links is there, and hidden folders are not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from milestones.staff.grading import root, sandbox
from tests.helpers.mini_course import SHELF
from tests.helpers.submissions import Graded, make_course, skeleton_of

SECRET, LIBRARY = "course/secret.py", "course/environment/library.py"


def seen(tree: Path, hidden: Iterable[Path], paths: Iterable[Path]) -> list[bool]:
    """Return which files a process sees in the sandbox. Skip the test where there is none."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            box = sandbox.Box(tree, tuple(hidden), 1 << 20, sandbox.new_user())
            if sandbox.shut_off(box).files:
                os.write(writer, bytes(path.is_file() for path in paths))
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    if not said:
        pytest.skip("the kernel does not allow a root of its own")
    return [*map(bool, said)]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A course with an environment inside, and links to both."""
    for file in (SECRET, LIBRARY, "tree/code.py"):
        (tmp_path / "real" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "real" / file).touch()
    (tmp_path / "other").symlink_to("real")
    (tmp_path / "real/link").symlink_to(tmp_path / "other/course/environment")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["real/course/environment", "other/course/environment", "real/link"]
)
@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a kept folder"])
def test_what_is_needed_is_there_by_all_its_names(
    name: str, around: bool, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden course lies around the environment, and perhaps in a folder that is kept."""
    needed = {made / name, *([made / "other"] if around else [])}
    monkeypatch.setattr(root, "_needed", lambda: needed)
    names = [made / name / "library.py", made / "real" / LIBRARY]
    secrets = [made / "real" / SECRET, made / "other" / SECRET]
    (made / "trees/tree").mkdir(parents=True)
    found = seen(made / "trees/tree", [made / "real/course"], [*names, *secrets])
    assert found == [True, True, False, False]


@pytest.mark.parametrize("link", ["the environment", "a folder around it"])
def test_a_right_submission_has_its_points_in_an_environment_behind_a_link(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable, prefix = Path(sys.executable), Path(sys.prefix)
    if prefix not in executable.parents:
        pytest.skip("this Python is not in its own folder")
    linked = prefix if link == "the environment" else prefix.parent
    (tmp_path / "linked").symlink_to(linked)
    python = tmp_path / "linked" / executable.relative_to(linked)
    monkeypatch.setattr(sys, "executable", str(python))
    course = make_course(tmp_path / "course")
    graded = Graded(tmp_path, {"right": SHELF, "unwritten": skeleton_of(course)}, course=course)
    assert {name: sheet.points for name, sheet in graded.sheets.items()} == {
        "right": 10, "unwritten": 0,
    }  # fmt: skip
