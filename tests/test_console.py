"""`python -m milestones`: the bench, and what of the GPU check runs without a GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milestones import bench, gpu_check, host_time, overlap_check
from tests.conftest import MILESTONES, ROOT


def console(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "milestones", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_bench_has_every_rung_and_the_peers() -> None:
    assert [c.name for c in bench.contenders()] == [*MILESTONES, "hf-static"]


def test_bench_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lowest rung, the highest and a peer, each in a process of its own."""
    file = tmp_path / "bench.json"
    few = [c for c in bench.contenders() if c.name in (MILESTONES[0], MILESTONES[-1], "hf-static")]
    monkeypatch.setattr(bench, "contenders", lambda: few)
    arguments = ["--requests", "2", "--max-tokens", "3", "--rounds", "1", "--json", str(file)]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.main(parser.parse_args(["--model", "tiny-llama", *arguments])) == 0
    measured, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert set(measured["engines"]) == {c.name for c in few} and measured["machine"]
    for contender in few[:2]:
        assert contender.name in shown
        assert measured["engines"][contender.name]["stats"]["decode_tokens"] == 2 * 2
    assert "\x1b" not in shown


def test_bench_refreshes_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from common.workload import WorkloadResult

    start, end = bench.README_MARKS
    (tmp_path / "README.md").write_text(f"before\n{start}\nold\n{end}\nafter\n")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    result = WorkloadResult([[1, 2]], 0.5, [0.1], {}, kv_reserved=10, kv_used=4)
    bench.refresh_readme([bench.Contender("m1_single", (), [result])], 1, 2)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| m1_single | 4.0 | 1.0 x | 0.10 s | 60% |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_gpu_check_says_that_it_needs_a_gpu() -> None:
    done = console("gpu-check")
    assert done.returncode == 2 and "needs a CUDA device" in done.stdout


def test_gpu_checks_engine_part(milestone: str) -> None:
    """The part that runs anywhere: a rung against Hugging Face's own answers."""
    assert gpu_check.check_engine(milestone, "cpu")["passed"]


@pytest.mark.parametrize("rung", host_time.RUNGS)
def test_host_time_of_a_rung(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, and nothing is left behind on the model that engines share."""
    monkeypatch.setattr(host_time, "STEPS", 8)
    monkeypatch.setattr(host_time, "EMULATED_FORWARD_MS", 3.0)
    runner = importlib.import_module(f"{rung}.model_runner")
    before = runner.sample
    measured = host_time.measure(rung, 2)
    assert measured.host > 0 and measured.gap > 0
    assert runner.sample is before


def test_gpu_checks_overlap_part() -> None:
    """Its four settings, on this machine's forward stream."""
    rows = overlap_check.check_overlap("cpu")
    assert [(row["cuda_graph"], row["enable_overlap"]) for row in rows] == [
        (False, False), (False, True), (True, False), (True, True),
    ]  # fmt: skip
    assert all(row["passed"] for row in rows)


@pytest.mark.since("m3_paged")
def test_gpu_checks_kernel_part(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case under the interpreter, which cannot multiply bfloat16."""
    case = {"contexts": [5, 17, 9], "counts": [1, 1, 9], "heads": (6, 2), "dim": 32}
    monkeypatch.setattr(gpu_check, "CASES", [case])
    rows = gpu_check.check_kernels(milestone, "cpu")
    assert len(rows) == 3 * len(gpu_check.PAGE_SIZES)
    assert all(row["passed"] for row in rows if row["dtype"] != "torch.bfloat16"), rows
