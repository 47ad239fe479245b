"""`python -m milestones propagate` carries an edit to higher milestones, or says why it cannot."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from milestones.staff.maintain import merge, propagate
from tests.conftest import MILESTONES, ROOT

# An edit of `engine.py`, in a line that no lesson changes.
FIX = ("self.scheduler.add_request(request)", "return self.scheduler.add_request(request)")


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own with the engines and their DELTA.toml files."""
    root = tmp_path_factory.mktemp("ladder")
    for name in MILESTONES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        (root / "milestones" / name).mkdir(parents=True)
        if (source := ROOT / "milestones" / name / "DELTA.toml").exists():
            shutil.copy(source, root / "milestones" / name)
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


@pytest.fixture
def repository(committed: Path) -> Path:
    """The same repository, reset to its commit for each test."""
    for command in (["checkout", "-q", "--", "."], ["clean", "-qfd"]):
        subprocess.run(["git", *command], cwd=committed, check=True)
    return committed


def run(root: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    propagate.add_arguments(parser)
    args = parser.parse_args(arguments)
    args.root = root
    return propagate.main(args)


def edit(root: Path, path: str, old: str, new: str) -> None:
    text = (root / path).read_text()
    assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
    (root / path).write_text(text.replace(old, new))


def status(root: Path) -> dict[str, str]:
    """Return what differs from the commit: the paths and states that `git status` prints."""
    command = ["git", "status", "--porcelain", "-uall"]
    out = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return {line[3:]: line[:2].strip() for line in out.splitlines()}


def test_a_fix_goes_to_the_top(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fix is in a line that no lesson changes, in files that the lessons do change."""
    edit(repository, "m2_continuous/engine.py", *FIX)
    assert run(repository, "m2", "--dry-run") == 0
    assert status(repository) == {"m2_continuous/engine.py": "M"}, "a dry run wrote"
    assert "dry run" in capsys.readouterr().out
    assert run(repository, "m2") == 0
    assert set(status(repository)) == {f"{name}/engine.py" for name in MILESTONES[1:]}
    for name in MILESTONES[1:]:
        assert f"{FIX[1]}\n" in (repository / name / "engine.py").read_text()
    capsys.readouterr()
    assert run(repository, "m2", "--json") == 0
    kinds = {step["kind"] for step in json.loads(capsys.readouterr().out)["steps"]}
    assert kinds == {"unchanged"}, "the edit was carried twice"


def test_a_file_that_extends_another_one_needs_no_edit(repository: Path) -> None:
    """An elective's class inherits the edit. An elective with a file of its own gets it."""
    engine = (repository / "m5_overlap/engine.py").read_text()
    extending = "from .m5_engine import LLMEngine as M5LLMEngine\n"
    for name, text in {"whole": engine, "extends": extending}.items():
        folder = repository / "milestones/electives" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "engine.py").write_text(text)
    edit(repository, "m1_single/engine.py", *FIX)
    run(repository, "m1")
    assert FIX[1] in (repository / "milestones/electives/whole/engine.py").read_text()
    assert (repository / "milestones/electives/extends/engine.py").read_text() == extending


def test_a_conflict_stops_its_file_alone(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`schedule` is changed by m3's lesson. A fix in another file is carried nevertheless."""
    edit(
        repository, "m2_continuous/scheduler.py",
        "        rows = self.kv_cache.rows\n", "        rows = list(self.kv_cache.rows)\n",
    )  # fmt: skip
    edit(repository, "m2_continuous/engine.py", *FIX)
    assert run(repository, "m2") == 1
    out = capsys.readouterr().out
    assert "conflict in m3_paged/scheduler.py, Scheduler.schedule" in out
    assert "Nothing of scheduler.py was written" in out
    written = {f"{name}/engine.py" for name in MILESTONES[1:]}
    assert set(status(repository)) == {*written, "m2_continuous/scheduler.py"}


def test_a_conflict_is_written_on_demand_and_no_higher(repository: Path) -> None:
    """m4's lesson changes this line. m4 is written only with --write-conflicts, and m5 never."""
    oldest = "            request = self.waiting[0]\n"
    edit(repository, "m3_paged/scheduler.py", oldest, f"{oldest}            assert request\n")
    assert run(repository, "m3") == 1
    assert status(repository) == {"m3_paged/scheduler.py": "M"}
    assert run(repository, "m3", "--write-conflicts") == 1
    marked = (repository / "m4_radix/scheduler.py").read_text()
    assert "<<<<<<< m4_radix" in marked and "assert request\n" in marked
    assert set(status(repository)) == {"m3_paged/scheduler.py", "m4_radix/scheduler.py"}


def test_mended_by_hand_it_goes_on(repository: Path) -> None:
    """An edit that m3 already has, made by hand, is carried on to m4 and m5."""
    for name in ("m2_continuous", "m3_paged"):
        edit(repository, f"{name}/engine.py", *FIX)
    assert run(repository, "m2") == 0
    assert f"{FIX[1]}\n" in (repository / "m5_overlap/engine.py").read_text()


def test_new_and_deleted_files(repository: Path) -> None:
    (repository / "m3_paged/extra.py").write_text('"""More."""\n')
    (repository / "m3_paged/triton_ops.py").unlink()  # the same file in m3, m4 and m5
    assert run(repository, "m3") == 0
    for name in MILESTONES[2:]:
        assert (repository / name / "extra.py").read_text() == '"""More."""\n'
        assert not (repository / name / "triton_ops.py").exists()


def test_a_file_that_a_lesson_needs_is_not_deleted(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "m2_continuous/kv_pool.py").unlink()
    (repository / "m2_continuous/attention.py").write_text("x = 1\n")
    assert run(repository, "m2") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "deleted below, but this lesson changed it" in out
    assert "new below, but exists in this milestone" in out
    assert set(status(repository)) == {"m2_continuous/kv_pool.py", "m2_continuous/attention.py"}


def test_an_edit_that_is_not_declared_is_noted(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The edit is in a function of m2 that m1 has too."""
    edit(repository, "m2_continuous/engine.py", *FIX)
    assert run(repository, "m2") == 0
    noted = capsys.readouterr().out
    expected = "engine.py:EngineCore.add_request is changed, but not declared"
    assert expected in " ".join(noted.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m5",), "m5_overlap is the highest milestone"),
        (("m7",), "there is no milestone 'm7'"),
        (("m2", "--since", "nowhere"), "git diff: fatal"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(repository, *arguments) == 2
    assert message in capsys.readouterr().err


def test_nothing_to_carry(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "m2") == 0
    assert "m2_continuous has no edits since HEAD" in capsys.readouterr().out


def test_nothing_is_replaced_when_a_text_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full at the second file, the first is unchanged and nothing else is left."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("old\n")
    staged = merge._staged

    def full(path: Path, text: str) -> str:
        if path.parent.name == "b":
            raise OSError("no space left")
        return staged(path, text)

    monkeypatch.setattr(merge, "_staged", full)
    steps = [merge.Step("x.py", milestone, "same", "old\n", "new\n") for milestone in ("a", "b")]
    with pytest.raises(OSError, match="no space"):
        merge.write(tmp_path, steps)
    assert {p.name: p.read_text() for p in tmp_path.rglob("*") if p.is_file()} == {"x.py": "old\n"}
    assert len(list(tmp_path.rglob("*.py*"))) == 2
