"""What the tests of the console share: a student's tree of the small course, and its commands."""

from __future__ import annotations

import argparse
from pathlib import Path

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

    def run(command: object, *arguments: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)  # type: ignore[attr-defined]
        args = parser.parse_args(arguments)
        runner = {"runner": mini_course.shared_runner()} if command in (check, break_it) else {}
        try:
            status: int = command.main(args, root=tree, **runner)  # type: ignore[attr-defined]
        except command.REFUSALS as error:  # type: ignore[attr-defined]
            return 2, str(error)  # as `python -m milestones` does
        return status, capsys.readouterr().out

    return run
