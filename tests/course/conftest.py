"""What the tests of the console share: a student's tree of the small course, and its commands."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from milestones.course.release import command as release
from milestones.course.student import break_it, check
from tests.helpers import mini_course
from tests.helpers.mini_course import Say


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a student's tree of the small course, with nothing written."""
    release.release("m2_mini", tmp_path / "student", mini_course.make(tmp_path / "course"))
    return tmp_path / "student"


@pytest.fixture
def say(tree: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """`say(check, "m2.1", "--trace")` returns the exit status and what was printed."""

    def run(command: ModuleType, *arguments: str) -> tuple[int, str]:
        runner = {"runner": mini_course.shared_runner()} if command in (check, break_it) else {}
        status = mini_course.called(command, tree, *arguments, **runner)
        said = capsys.readouterr()
        return status, said.out + said.err

    return run
