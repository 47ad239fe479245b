"""`project check`: the judgement of a change, and the runs of two trees."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common import EngineConfig
from common.clock import StepCosts
from common.displays.workload import Workload, WorkloadResult, run
from common.virtual_time import use_virtual_time
from m5_overlap import LLMEngine
from milestones.course.project import command
from milestones.course.project.compare import Counted, engine_in, pairs, tree_of
from milestones.course.project.judge import interval_of, judge, shown
from milestones.lab.bench.engines import BenchEngine
from tests.conftest import ROOT

GOOD, LEVEL = [1.30, 1.25, 1.28, 1.40, 1.22, 1.35], [1.0, 0.99, 1.02, 1.01, 0.98, 1.0]
STATS = dict.fromkeys(command.COUNTERS, 10)


@pytest.mark.parametrize(
    ("count", "interval"), [(5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))]
)
def test_the_interval_of_the_median_is_that_of_the_sign_test(
    count: int, interval: tuple[float, float] | None
) -> None:
    ratios = [float(number) for number in range(count, 0, -1)]
    assert interval_of(ratios) == interval


@pytest.mark.parametrize(
    ("target", "other", "is_shown"),
    [
        (GOOD, LEVEL, True),
        (GOOD[:5], LEVEL, False),  # too few pairs
        ([*GOOD[:5], 1.19], LEVEL, False),  # the interval reaches below
        (LEVEL, GOOD, False),  # another workload gains
        (GOOD, [*LEVEL[:5], 0.96], False),  # no evidence that it did not become worse
        (GOOD, [0.9] * 6, False),
    ],
)
def test_a_gain_is_shown_only_by_whole_intervals(
    target: list[float], other: list[float], is_shown: bool
) -> None:
    judged = judge("b", {"a": other, "b": target})
    assert [one.workload for one in judged] == ["b", "a"], "the target is the first"
    assert shown(judged) == shown(judged, True) == is_shown
    assert not shown(judged, False), "the suite is the referee"
    assert all(one.holds or one.words.startswith("not shown: ") for one in judged)


def test_one_exact_ratio_is_enough() -> None:
    assert shown(judge("a", {"a": [1.21], "b": [0.98]}, exact=True))
    assert not shown(judge("a", {"a": [1.20], "b": [1.0]}, exact=True))
    assert not shown(judge("a", {"a": [1.21]}, exact=False))
    with pytest.raises(ValueError, match="the target c was not measured"):
        judge("c", {"a": [1.0]})


class Fake(BenchEngine):
    """An engine that takes a fixed time. runs: the names of the engines in order."""

    def __init__(self, name: str, seconds: float, virtual: float, runs: list[str]) -> None:
        super().__init__(name)
        self.seconds, self.virtual, self.runs = seconds, virtual, runs

    def run(self, workload: Workload) -> WorkloadResult:
        self.runs.append(self.name)
        seconds = self.seconds if workload.costs is None else self.virtual
        return WorkloadResult([[1]], seconds, [0.1], dict(STATS))


def test_pairs_take_turns_and_the_change_is_faster_above_one() -> None:
    runs: list[str] = []
    base, change = Fake("base", 3.0, 1.0, runs), Fake("change", 2.0, 1.0, runs)
    found = pairs({"a": Workload([[1]], [1])}, base, change, 3, lambda words: None)
    assert found == {"a": [1.5] * 3}
    assert runs == ["base", "change", "change", "base", "base", "change"]


def test_a_counter_that_differs_is_seen() -> None:
    result = WorkloadResult([[1]], 1.0, [0.1], dict(STATS))
    assert not Counted(result, result).differs
    assert Counted(result, replace(result, stats={**STATS, "padding_tokens": 3})).differs
    both = Counted(result, replace(result, seconds=0.5))
    assert both.differs and both.ratio == 2


def check(monkeypatch: pytest.MonkeyPatch, virtual: float, *words: str) -> tuple[int, list[str]]:
    """Run `project check` with engines of which the change takes 0.7 of the time."""
    runs: list[str] = []
    made = iter([Fake("base", 1.0, 1.0, runs), Fake("change", 0.7, virtual, runs)])
    monkeypatch.setattr(command, "engine_in", lambda folder, engine: next(made))
    monkeypatch.setattr(command, "replace", lambda engine, name: engine)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["check", "--base", str(ROOT), "--model", "tiny-llama", *words])
    return command.main(args), runs


def test_the_command_counts_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, runs = check(monkeypatch, 0.5, "--target", "shared")
    said = capsys.readouterr().out
    assert (status, len(runs)) == (0, 2 * len(command.NAMES)), "once on each tree"
    assert "1.000 → 0.500" in said and "shown, if the shared suite passes" in said
    status, runs = check(monkeypatch, 1.0, "--target", "shared")
    assert (status, len(runs)) == (0, 2 * len(command.NAMES) * (1 + command.ROUNDS))
    status, runs = check(monkeypatch, 1.0, "--target", "shared", "--by", "counters")
    said = capsys.readouterr().out
    assert status == 1 and "not shown: lies below 1.20" in said
    status, runs = check(monkeypatch, 0.5, "--target", "prompt_2048")
    assert (status, len(runs)) == (0, 2 * (len(command.NAMES) + 1) * command.ROUNDS), "by time"
    assert check(monkeypatch, 0.5, "--target", "shared", "--workload", "alone")[0] == 1
    assert "4 workloads were not measured" in capsys.readouterr().out


@pytest.mark.parametrize("passes", [True, False])
def test_the_suite_decides(passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], **_: Any) -> Any:
        ran.append(words[1:])
        return subprocess.CompletedProcess(words, 0 if passes else 1)

    monkeypatch.setattr(subprocess, "run", run)
    status, _ = check(monkeypatch, 0.5, "--target", "alone", "--suite")
    assert status == (0 if passes else 1)
    assert ran == [["-m", "pytest", "tests", "--milestone=m5_overlap"]]


def test_tests_that_the_student_changed_are_named(tmp_path: Path) -> None:
    for tree, text in (("base", "a"), ("own", "b")):
        (tmp_path / tree / "tests").mkdir(parents=True)
        (tmp_path / tree / "tests/test_a.py").write_text(text)
        (tmp_path / tree / "tests/test_b.py").write_text("same")
    (tmp_path / "own/tests/test_new.py").write_text("new")
    assert command.changed_tests(tmp_path / "base", tmp_path / "own") == ["tests/test_a.py"]


def test_a_base_is_a_folder_or_a_commit(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a.py").write_text("first")
    subprocess.run([*git, "add", "a.py"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "first"], cwd=tmp_path, check=True)
    (tmp_path / "a.py").write_text("second")
    with tree_of("HEAD", tmp_path) as folder:
        assert [path.name for path in folder.iterdir()] == ["a.py"]
        assert (folder / "a.py").read_text() == "first"
    assert not folder.exists(), "the copy is removed"
    with tree_of(str(tmp_path), ROOT) as folder:
        assert folder == tmp_path
    with (
        pytest.raises(ValueError, match="nothing is neither a folder nor a commit"),
        tree_of("nothing", tmp_path),
    ):
        pass


def test_an_engine_runs_in_its_tree(tmp_path: Path) -> None:
    """The process imports from the tree, and gets standard input."""
    (tmp_path / "echo.py").write_text("import os, sys\nprint(os.getcwd(), sys.stdin.read())")
    engine = engine_in(tmp_path, "m5_overlap")
    assert engine.command[1:] == (str(tmp_path), "common.displays.workload_process", "m5_overlap")
    done = subprocess.run(
        [sys.executable, "-m", engine.command[0], str(tmp_path), "echo"],
        input="hello", cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(tmp_path), "hello"]


@pytest.mark.thorough("six workloads on an engine")
def test_the_topics_have_the_counters_of_m5() -> None:
    page = (ROOT / "milestones/project/topics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == command.NAMES
    for name, work in command.works_of(command.NAMES, command.TINY).items():
        with LLMEngine(EngineConfig(**work.config, device="cpu")) as engine:
            use_virtual_time(engine, StepCosts())
            result = run(engine, work)
        tokens = sum(map(len, result.token_ids))
        counted = (result.stats["num_steps"], result.stats["prefill_tokens"], tokens)
        assert (name, *map(str, counted), f"{result.seconds:.3f}") in rows, name
