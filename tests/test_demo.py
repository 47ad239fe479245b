"""The demos into a file: the same facts, no control codes, whatever the model."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import ROOT


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


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--max-tokens", "many"]])
def test_bad_arguments(milestone: str, arguments: list[str]) -> None:
    done = run_demo(milestone, *arguments)
    assert done.returncode == 2 and arguments[0] in done.stderr


def test_a_model_that_is_not_there() -> None:
    done = run_demo("m1_single", "--model", "/nowhere/model.gguf")
    assert done.returncode == 1 and done.stderr == "model '/nowhere/model.gguf' does not exist\n"


@pytest.mark.before("m2_continuous")
def test_what_the_first_rung_shows(milestone: str) -> None:
    assert_facts(
        milestone, "with the KV cache", "full recompute", "the text is the same", "256 tokens"
    )


@pytest.mark.since("m2_continuous")
def test_what_arrives_is_served(milestone: str) -> None:
    assert_facts(milestone, "r3 joins", "r3 ends", "ratio")


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
def test_emulation_and_the_ladder(milestone: str) -> None:
    done = run_demo(
        milestone, "--model", "tiny-llama", "--requests", "2", "--max-tokens", "3", "--ladder",
        "--emulate", "5",
    )  # fmt: skip
    assert done.stdout.count("emulated forwards") == 3, "each time it shows"
    for rung in ("the ladder", "m1", "m2", "m3", "m4", "m5"):
        assert rung in done.stdout.split("at least 5 ms each")[-1]


@pytest.mark.since("m5_overlap")
def test_what_cannot_be_emulated(milestone: str) -> None:
    done = run_demo(milestone, "--emulate", "-1")
    assert done.returncode == 2 and "--emulate" in done.stderr
