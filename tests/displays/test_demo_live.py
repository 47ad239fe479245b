"""The live parts of the demos show their lesson with the arguments that they have by default."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from milestones.chain import load

Live = Callable[..., str]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Live:
    """Return a function that runs a demo by default, without its comparisons. It returns stdout."""

    def run(name: str, *compared: str) -> str:
        demo = load(name, "demo")
        for function in compared:
            monkeypatch.setattr(demo, function, lambda *_: {})
        monkeypatch.setattr(sys, "argv", ["demo", "--plain"])
        demo.main()
        return capsys.readouterr().out

    return run


@pytest.mark.thorough("a demo on the real model")
@pytest.mark.since("m3_paged")
@pytest.mark.before("m4_radix")
def test_the_live_demo_of_pages_retracts(live: Live, milestone: str) -> None:
    shown = live(milestone, "run_milestones", "comparison")
    assert shown.count("is retracted: it waits to be computed again") >= 1


@pytest.mark.thorough("a demo on the real model")
@pytest.mark.since("m4_radix")
@pytest.mark.before("m5_overlap")
def test_the_live_demo_of_the_tree_evicts(
    live: Live, milestone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo, opened = load(milestone, "demo"), list[Any]()

    def panels(*args: Any) -> Any:
        opened.append(kept(*args))
        return opened[-1]

    kept = demo.Panels
    monkeypatch.setattr(demo, "Panels", panels)
    live(milestone, "run_milestones", "comparison", "compare_policies")
    [shown] = opened
    assert shown.num_evicted > 0
    assert f"{shown.num_evicted} pages evicted" in str([*shown()][-1])
