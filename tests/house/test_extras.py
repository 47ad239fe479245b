"""Optional packages: `python -m milestones extras`, and the mark of tests that need them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from milestones import extras
from tests.conftest import ROOT
from tests.helpers.deselected import Shard, missing
from tests.house.test_repository import pins


def test_extras_are_pinned() -> None:
    """The constraints have a version of each package, and the oldest allowed one is not newer."""
    found = pins()
    for lines in extras.extras().values():
        for requirement in map(Requirement, lines):
            assert requirement.specifier.contains(found[requirement.name]), requirement


def test_the_command_installs_with_the_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> Any:
        ran.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    parser = argparse.ArgumentParser()
    extras.add_arguments(parser)
    assert extras.main(parser.parse_args(["serve"])) == 3
    assert extras.main(parser.parse_args(["--all"])) == 3
    assert ran[0][0] == sys.executable and str(ROOT / "constraints.txt") in ran[0]
    assert ran[0][-len(extras.extras()["serve"]) :] == extras.extras()["serve"]
    assert extras.main(parser.parse_args(["nothing"])) == 2 and len(ran) == 2


def test_the_command_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    extras.add_arguments(parser)
    assert extras.main(parser.parse_args([])) == 0
    assert "serve: fastapi" in capsys.readouterr().out


CONFTEST = """
import tests.helpers.deselected as plugin
plugin.missing = lambda name: f'{name} is missing' if name == 'absent' else None
def pytest_configure(config):
    config.pluginmanager.register(plugin.Deselected(**OPTIONS))
    config.addinivalue_line('markers', 'extra(name): needs it')
    config.addinivalue_line('markers', 'thorough(reason): costs much')
"""


def told(folder: Path, workers: str = "0", **options: bool) -> str:
    """Return what pytest says of the tests in a folder, with these options of `Deselected`."""
    (folder / "conftest.py").write_text(f"OPTIONS = {options}{CONFTEST}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", workers, "-c", "/dev/null", str(folder),
         "-p", "no:cacheprovider", "--rootdir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "workers", ["0", pytest.param("2", marks=pytest.mark.thorough("more processes"))]
)
def test_tests_that_are_left_out_are_counted(workers: str, tmp_path: Path) -> None:
    """Also with xdist, where the workers collect."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.extra('absent')\n"
        "@pytest.mark.parametrize('i', range(3))\n"
        "def test_a(i): assert False\n"
        "@pytest.mark.extra('present')\n"
        "def test_b(): pass\n"
        "@pytest.mark.thorough('many cases')\n"
        "def test_c(): assert False\n"
    )
    said = told(tmp_path, workers, thorough=False)
    assert "1 passed" in said
    assert "3 tests deselected: absent is missing" in said
    assert "1 tests deselected: thorough: `make test-all` or" in said


def test_the_rest_is_what_the_first_tier_has_not_run(tmp_path: Path) -> None:
    """It is the second tier, the tests of extras, and what does more in the second tier."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_a(): assert False\n"
        "@pytest.mark.extra('present')\n"
        "def test_b(): pass\n"
        "@pytest.mark.thorough('many cases')\n"
        "def test_c(): pass\n"
    )
    (tmp_path / "test_more.py").write_text("def test_d(): 'schedules(100)'\n")
    said = told(tmp_path, thorough=True, rest=True)
    assert "3 passed, 1 deselected" in said
    assert "1 tests deselected: first tier" in said


def test_each_test_is_in_one_shard() -> None:
    tests = [f"tests/test_it.py::test_{i}" for i in range(300)]
    shards = [Shard.parse(f"{number}/3") for number in (1, 2, 3)]
    parts = [{test for test in tests if shard.has(test)} for shard in shards]
    assert sum(map(len, parts)) == 300 and set.union(*parts) == {*tests}
    assert all(80 < len(part) < 120 for part in parts)
    for wrong in ("0/3", "4/3", "1", "one/3"):
        with pytest.raises(pytest.UsageError, match="a shard is one like 2/3"):
            Shard.parse(wrong)


def test_programs_of_the_system_are_an_extra_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qemu-aarch64").write_text("")
    (tmp_path / "qemu-aarch64").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = missing("arm")
    assert said == "no aarch64-linux-gnu-gcc: apt-get install gcc-aarch64-linux-gnu"
    (tmp_path / "qemu-aarch64").rename(tmp_path / "aarch64-linux-gnu-gcc")
    assert missing("arm") == "no qemu-aarch64: apt-get install qemu-user"
