"""The demos into a file: the same facts, no control codes, whatever the model."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from common import EngineStats, comparison
from common.workload import Workload, WorkloadResult
from tests.conftest import MILESTONES, ROOT

DemoHere = Callable[..., tuple[str | int | None, str, str]]


@functools.cache
def run_demo(milestone: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"{milestone}.demo", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@functools.cache
def usual_run(milestone: str) -> tuple[subprocess.CompletedProcess[str], Path, Path]:
    """What most tests look at: a run, its trace, and its player."""
    folder = Path(tempfile.mkdtemp())
    trace, player = folder / "trace.json", folder / "player.html"
    done = run_demo(
        milestone, "--model", "tiny-llama", "--requests", "4", "--max-tokens", "5", "--check",
        "--trace", str(trace), "--player", str(player),
    )  # fmt: skip
    return done, trace, player


def assert_facts(milestone: str, *facts: str) -> None:
    done = usual_run(milestone)[0]
    for fact in facts:
        assert fact in done.stdout, done.stdout


def test_the_demo_runs_into_a_file(milestone: str) -> None:
    done, trace, player = usual_run(milestone)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    assert milestone in done.stdout and "tokens/s" in done.stdout
    for path in (trace, player):
        assert str(path) in done.stdout and milestone in path.read_text(encoding="utf-8")


@pytest.fixture
def demo_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DemoHere:
    """Run a demo in this process: what it exits with, and its two outputs."""

    def run(milestone: str, *arguments: str) -> tuple[str | int | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["demo", *arguments])
        code: str | int | None = 0
        try:
            importlib.import_module(f"{milestone}.demo").main()
        except SystemExit as exit:
            code = exit.code
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--max-tokens", "many"]])
def test_bad_arguments(milestone: str, arguments: list[str], demo_here: DemoHere) -> None:
    code, _, said = demo_here(milestone, *arguments)
    assert code == 2 and arguments[0] in said


def test_a_model_that_is_not_there(milestone: str, demo_here: DemoHere) -> None:
    """A line, and no traceback."""
    code, _, _ = demo_here(milestone, "--model", "/nowhere/model.gguf")
    assert code == "model '/nowhere/model.gguf' does not exist"


@pytest.mark.before("m2_continuous")
def test_what_the_first_rung_shows(milestone: str) -> None:
    assert_facts(
        milestone, "with the KV cache", "full recompute", "The text is the same.", "256 tokens"
    )


@pytest.mark.since("m2_continuous")
def test_what_arrives_is_served(milestone: str) -> None:
    assert_facts(milestone, "r3 joins", "r3 ends", "ratio", "throughput")


@pytest.mark.since("m2_continuous")
@pytest.mark.before("m5_overlap")
def test_the_demo_compares_with_the_rung_below(milestone: str) -> None:
    assert_facts(milestone, "KV memory", "m" + str(int(milestone[1]) - 1))


@pytest.mark.since("m4_radix")
@pytest.mark.before("m5_overlap")
def test_what_the_fourth_rung_shows(milestone: str) -> None:
    assert_facts(milestone, "hit rate", "TTFT", "dfs-weight", "Say that again in one sentence.")


@pytest.mark.since("m5_overlap")
def test_what_the_fifth_rung_shows(milestone: str) -> None:
    """Both loops, their lanes and gaps; nothing is emulated that was not asked for."""
    assert_facts(
        milestone, "serial · lanes", "overlapped · lanes", "mean gap between forwards", "ITL p95",
        "cache hit rate", "Say that again in one sentence.",
    )  # fmt: skip
    assert "emulated" not in usual_run(milestone)[0].stdout


@pytest.mark.since("m5_overlap")
def test_emulation_and_the_ladder(
    milestone: str, demo_here: DemoHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each view of an emulated run says so; the ladder is real, each rung in its process."""
    asked = []

    def run_rung(rung: str, workload: Workload) -> WorkloadResult:
        asked.append((rung, workload.config["emulated_forward_ms"]))
        return WorkloadResult([[1]], 1.0, [0.5], stats=asdict(EngineStats(num_steps=1)))

    monkeypatch.setattr(comparison, "run_rung", run_rung)
    code, shown, _ = demo_here(
        milestone, "--model", "tiny-llama", "--requests", "2", "--max-tokens", "3", "--ladder",
        "--emulate", "5", "--plain",
    )  # fmt: skip
    assert code == 0 and shown.count("emulated forwards") == 3
    assert asked == [(rung, 0.0) for rung in MILESTONES]
    for rung in ("all milestones", "m1", "m2", "m3", "m4", "m5"):
        assert rung in shown.split("at least 5 ms each")[-1]


@pytest.mark.since("m5_overlap")
def test_what_cannot_be_emulated(milestone: str, demo_here: DemoHere) -> None:
    code, _, said = demo_here(milestone, "--emulate", "-1")
    assert code == 2 and "--emulate" in said
