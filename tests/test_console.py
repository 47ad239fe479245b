"""`python -m milestones`: commands that measure, and the parts of `gpu-check` that need no GPU."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from milestones.bench import gpu_correct, host_time, overlap_check
from tests.conftest import ROOT


def console(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "milestones", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_gpu_check_says_that_it_needs_a_gpu() -> None:
    done = console("gpu-check")
    assert done.returncode == 2 and "needs a CUDA device" in done.stdout


def test_gpu_checks_engine_part(milestone: str) -> None:
    """The part that runs anywhere compares a milestone with Hugging Face's own answers."""
    assert gpu_correct.check_engine(milestone, "cpu")["passed"]


@pytest.mark.parametrize("rung", host_time.RUNGS)
def test_host_time_of_a_rung(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host time is measured, and the function that measures it is removed again."""
    monkeypatch.setattr(host_time, "STEPS", 8)
    monkeypatch.setattr(host_time, "EMULATED_FORWARD_MS", 3.0)
    runner = importlib.import_module(f"{rung}.model_runner")
    before = runner.sample
    measured = host_time.measure(rung, 2)
    assert measured.host > 0 and measured.gap > 0
    assert runner.sample is before


def test_gpu_checks_overlap_part() -> None:
    """The overlap part runs its four settings on this machine's forward stream."""
    rows = overlap_check.check_overlap("cpu")
    assert [(row["cuda_graph"], row["enable_overlap"]) for row in rows] == [
        (False, False), (False, True), (True, False), (True, True),
    ]  # fmt: skip
    assert all(row["passed"] for row in rows)


@pytest.mark.since("m3_paged")
def test_gpu_checks_kernel_part(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case runs under the interpreter, which cannot multiply bfloat16."""
    case = {"contexts": [5, 17, 9], "counts": [1, 1, 9], "heads": (6, 2), "dim": 32}
    monkeypatch.setattr(gpu_correct, "CASES", [case])
    rows = gpu_correct.check_kernels(milestone, "cpu")
    assert len(rows) == 3 * len(gpu_correct.PAGE_SIZES)
    assert all(row["passed"] for row in rows if row["dtype"] != "torch.bfloat16"), rows
