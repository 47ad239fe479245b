"""The first tier, which `make test` runs, has tests of everything that a user would miss first."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from milestones.__main__ import COMMANDS
from milestones.chain import electives
from tests.conftest import MILESTONES, MOST_CAPTURED_LINES, ROOT, shortened

pytestmark = pytest.mark.thorough("it collects the whole suite in a process")

Test = tuple[str, str, str]  # its file, its name, and its parameters


@functools.cache
def first_tier() -> list[Test]:
    """Return the tests of the first tier."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    found = re.findall(r"^(tests/\S+\.py)::(\w+)(.*)$", done.stdout, re.MULTILINE)
    assert len(found) > 1000
    return found


def imported(path: Path) -> set[str]:
    """Return the modules of `milestones` that a file of tests imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("milestones"):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name}


@pytest.mark.parametrize("number", range(1, 7))
def test_each_invariant_on_each_milestone(number: int) -> None:
    tests = [
        test for test in first_tier() if test[0].startswith(f"tests/invariants/test_i{number}_")
    ]
    counts = Counter(name for *_, given in tests for name in MILESTONES if name in given)
    assert counts.keys() == {*MILESTONES}, f"I{number} is not tested on every milestone"


def test_each_exercise() -> None:
    files = {path.name for path in (ROOT / "tests/exercises").glob("test_*.py")}
    assert files == {file.rpartition("/")[2] for file, *_ in first_tier() if "/exercises/" in file}
    for path in (ROOT / "tests/exercises").glob("test_*.py"):
        assert "thorough" not in path.read_text(encoding="utf-8"), f"{path.name} is a student's"


def test_each_elective() -> None:
    counts = Counter(file.rpartition("/")[2] for file, *_ in first_tier() if "/electives/" in file)
    for name in electives():
        assert counts[f"test_{name}.py"] >= 5, f"{name} has hardly a test in the first tier"


def test_each_demo() -> None:
    runs = [given for _, name, given in first_tier() if name == "test_the_demo_runs_into_a_file"]
    assert all(any(milestone in given for given in runs) for milestone in MILESTONES)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_console(command: str) -> None:
    """A file that imports the module of the command, or has its name, has a quick test."""
    module = f"milestones.{COMMANDS[command][0]}"
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if module in imported(path) or f'"{command}"' in path.read_text(encoding="utf-8")
    }
    assert files & {file for file, *_ in first_tier()}, f"{command} has no test in the first tier"


def test_the_report_of_a_failed_test_is_short() -> None:
    """A scheduler that fails in every step may log thousands of tracebacks in one test."""
    lines = [f"line {i}" for i in range(MOST_CAPTURED_LINES)]
    assert shortened("\n".join(lines)) == "\n".join(lines)
    assert shortened("\n".join(["first", "second", *lines])) == "\n".join(
        ["(2 lines before these)", *lines]
    )
