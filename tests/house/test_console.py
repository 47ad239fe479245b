"""`python -m milestones`: commands that measure, and the parts of `gpu-check` that need no GPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import fields

import pytest

from common.displays.workload import Workload, run
from common.outputs import StepCounters
from milestones.chain import below, sources
from milestones.course.student.list import size_of
from milestones.lab.bench import gpu_answers, host_time
from tests.conftest import ROOT, EngineFactory


def console(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "milestones", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.thorough("a process that imports torch, to see one line")
def test_gpu_check_says_that_it_needs_a_gpu() -> None:
    done = console("gpu-check")
    assert done.returncode == 2 and "needs a CUDA device" in done.stdout


def test_gpu_checks_engine_part(milestone: str) -> None:
    """The part that runs anywhere compares a milestone with Hugging Face's own answers."""
    assert gpu_answers.check_engine(milestone, "cpu")["passed"]


@pytest.mark.parametrize("name", host_time.MILESTONES)
def test_host_time_of_a_milestone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host time is measured, and the function that measures it is removed again."""
    monkeypatch.setattr(host_time, "STEPS", 8)
    runner = importlib.import_module(f"{name}.model_runner")
    before = runner.sample
    measured = host_time.measure(name, 2, pause_ms=3)
    assert measured.host > 0 and measured.gap > 0 and measured.cpu > 0
    assert runner.sample is before


def test_gpu_checks_overlap_part() -> None:
    """The overlap part runs its four settings on this machine's forward stream."""
    rows = list(gpu_answers.check_overlap(host_time.MILESTONES[-1], "cpu"))
    assert [(row["cuda_graph"], row["enable_overlap"]) for row in rows] == [
        (False, False), (False, True), (True, False), (True, True),
    ]  # fmt: skip
    assert all(row["passed"] for row in rows)


@pytest.mark.since("m3_paged")
def test_gpu_checks_kernel_part(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case runs under the interpreter, which cannot multiply bfloat16."""
    case = {"contexts": [5, 17, 9], "counts": [1, 1, 9], "heads": (6, 2), "dim": 32}
    monkeypatch.setattr(gpu_answers, "CASES", [case])
    rows = list(gpu_answers.check_kernels(milestone, "cpu"))
    assert len(rows) == len(gpu_answers.KINDS)
    assert all(row["passed"] for row in rows if row["dtype"] != "torch.bfloat16"), rows


def test_the_list_counts_an_engine_without_its_demo(milestone: str) -> None:
    files = [path for path in sources(milestone).values() if path.parent.name != "demo"]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    size = size_of(ROOT, milestone, below(milestone))
    assert size.lines == lines and 0 < size.added + size.changed <= lines


def test_the_counters_of_a_run_only_grow(make_engine: EngineFactory) -> None:
    """A run's counters are differences. That of a current value, as free pages, means nothing."""
    engine = make_engine(num_pages=32, page_size=4)
    for _ in range(2):  # in the second run, m4 and m5 have pages of the first one
        counted = run(engine, Workload([[1, 2, 3], [4] * 9], [3, 5], ignore_eos=True)).stats
        assert counted.keys() == {counter.name for counter in fields(StepCounters)}
        assert all(value >= 0 for value in counted.values()) and counted["num_steps"] > 0
