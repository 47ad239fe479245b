"""The demos into a file: the same facts, no control codes, whatever the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def run_demo(milestone: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"{milestone}.demo", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_demo_runs_into_a_file(milestone: str, tmp_path: Path) -> None:
    trace, player = str(tmp_path / "trace.json"), str(tmp_path / "player.html")
    done = run_demo(
        milestone, "--model", "tiny-llama", "--requests", "3", "--max-tokens", "6", "--check",
        "--trace", trace, "--player", player,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    assert milestone in done.stdout and "tokens/s" in done.stdout
    for path in (trace, player):
        assert path in done.stdout and milestone in Path(path).read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--max-tokens", "many"]])
def test_bad_arguments(milestone: str, arguments: list[str]) -> None:
    done = run_demo(milestone, *arguments)
    assert done.returncode == 2 and arguments[0] in done.stderr


@pytest.mark.before("m2_continuous")
def test_what_the_first_rung_shows(milestone: str) -> None:
    done = run_demo(milestone, "--model", "tiny-qwen3", "--requests", "1", "--max-tokens", "8")
    for fact in ("with the KV cache", "full recompute", "the text is the same", "256 tokens"):
        assert fact in done.stdout


@pytest.mark.since("m2_continuous")
def test_the_demo_compares_with_the_rung_below(milestone: str) -> None:
    done = run_demo(milestone, "--model", "tiny-llama", "--requests", "4", "--max-tokens", "5")
    for fact in ("r3 joins", "r3 ends", "ratio", "KV memory"):
        assert fact in done.stdout, done.stdout


@pytest.mark.since("m4_radix")
@pytest.mark.before("m5_overlap")
def test_what_the_fourth_rung_shows(milestone: str) -> None:
    done = run_demo(milestone, "--model", "tiny-llama", "--requests", "3", "--max-tokens", "4")
    for fact in ("hit rate", "TTFT", "dfs-weight", "Say that again in one sentence."):
        assert fact in done.stdout, done.stdout
