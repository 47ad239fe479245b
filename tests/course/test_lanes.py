"""The timelines of m5: each shows what the course says about its fault, and no answer changes."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from rich.console import Console

from common import EngineConfig, RequestOutput
from common.virtual_time import use_virtual_time
from milestones.chain import load
from milestones.course.student import lanes
from milestones.staff.maintain import timelines
from tests.conftest import ROOT, shared_model
from tests.helpers.mini_course import called
from tests.helpers.oracle import greedy

Json = dict[str, Any]
RECORDED: Json = json.loads(timelines.FILE.read_text(encoding="utf-8"))
RUNS: dict[str, Json] = {run["fault"]: run for run in RECORDED["runs"]}
FORWARD = max(f["end"] - f["start"] for f in RUNS["none"]["forward"])  # milliseconds


def longest(fault: str, name: str) -> float:
    """Return the milliseconds of the longest span of a name that is completely in the picture."""
    end = RUNS[fault]["forward"][-1]["end"]
    spans = [s for s in RUNS[fault]["host"] if s["name"] == name]
    whole = [s["end"] - s["start"] for s in spans if s["start"] >= 0 and s["end"] <= end]
    return max(whole, default=0.0)


def lengths(fault: str) -> list[float]:
    return [f["end"] - f["start"] for f in RUNS[fault]["forward"]]


def gaps(fault: str) -> list[float]:
    return [b["start"] - a["end"] for a, b in pairwise(RUNS[fault]["forward"])]


def covered(fault: str, name: str) -> list[float]:
    """Return, for each forward, the share of it in which the host is in spans of a name."""
    spans = [s for s in RUNS[fault]["host"] if s["name"] == name]
    return [
        sum(max(0.0, min(f["end"], s["end"]) - max(f["start"], s["start"])) for s in spans)
        / (f["end"] - f["start"])
        for f in RUNS[fault]["forward"]
    ]


def test_each_fault_is_recorded_once() -> None:
    assert tuple(RUNS) == timelines.ORDER
    assert RUNS.keys() == lanes.FAULTS.keys() == timelines.FAULTS.keys()
    text = " ".join((ROOT / "milestones/docs/INSTRUCTORS.md").read_text(encoding="utf-8").split())
    for number, fault in enumerate(RUNS, 1):
        assert f"*Timeline {number}* (`{fault}`)" in text


def test_without_a_fault_no_forward_waits() -> None:
    assert max(gaps("none")) == 0 and min(covered("none", "wait")) > 0.4
    assert lengths("none") == pytest.approx([FORWARD] * 5)
    idle = RUNS.keys() - {"none"}
    assert RUNS["none"]["busy"] == 1 and max(RUNS[fault]["busy"] for fault in idle) < 0.98


def test_the_serial_loop_waits_during_the_whole_forward() -> None:
    assert min(covered("serial", "wait")) > 0.9 and min(gaps("serial")) > 0.5
    assert longest("serial", "launch") < 0.5 * FORWARD
    assert {f["tokens"] for f in RUNS["serial"]["forward"]} == {16}


def test_a_launch_with_a_sync_is_as_long_as_a_usual_forward() -> None:
    assert min(covered("sync", "launch")) > 0.9 and longest("sync", "wait") < 1
    assert longest("sync", "launch") > 0.95 * FORWARD
    assert max(lengths("sync")) < 1.2 * FORWARD and min(gaps("sync")) > 0.5


def test_without_a_graph_the_forward_is_as_long_as_its_launch() -> None:
    assert mean(covered("graph", "launch")) > 0.9 and longest("graph", "wait") < 1
    assert min(lengths("graph")) > 1.3 * FORWARD


def test_slow_text_is_longer_than_a_forward() -> None:
    assert longest("text", "process") > 1.3 * FORWARD and mean(covered("text", "wait")) < 0.1
    assert max(lengths("text")) < 1.2 * FORWARD and max(gaps("text")) > 1


def test_retracted_requests_compute_their_prompts_again() -> None:
    tokens = [f["tokens"] for f in RUNS["retractions"]["forward"]]
    assert sum(count > RECORDED["num_requests"] for count in tokens) >= 2
    assert RUNS["retractions"]["retractions"] > 10
    assert all(RUNS[fault]["retractions"] == 0 for fault in RUNS if fault != "retractions")
    largest = max(range(len(tokens)), key=lambda n: tokens[n])
    assert lengths("retractions")[largest] == max(lengths("retractions"))
    assert mean(covered("retractions", "wait")) > 0.5 and max(gaps("retractions")) > 0.8


def test_another_recording_is_equal() -> None:
    assert timelines.record(shared_model("tiny-llama")) == RECORDED


def test_no_fault_changes_an_answer() -> None:
    """I1: each fault costs time. All of them are invisible to a test of tokens."""
    answers = {}
    config = EngineConfig(
        model="tiny-llama", device="cpu", page_size=4, num_pages=16, max_num_seqs=4
    )
    for name, fault in timelines.FAULTS.items():
        with load("m5_overlap").LLMEngine(config, shared_model("tiny-llama")) as engine:
            use_virtual_time(engine)
            fault(engine)
            prompts = [[3 + n, 5, 8 + n, 13] for n in range(5)]
            params = greedy(9, ignore_eos=True)
            outputs: list[RequestOutput] = engine.generate(prompts, params)
            answers[name] = [output.outputs[0].token_ids for output in outputs]
    assert all(found == answers["none"] for found in answers.values())


def said(*arguments: object) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        out = io.StringIO()
        patch.setattr(lanes, "Console", lambda: Console(width=100, file=out))
        status = called(lanes, ROOT, *map(str, arguments))
    return status, out.getvalue()


def test_a_diagnosis_is_checked() -> None:
    for number, fault in enumerate(RUNS, 1):
        assert said(number, fault)[0] == 0
        for other in RUNS.keys() - {fault}:
            status, text = said(number, other)
            assert status == 1 and lanes.FAULTS[other][1][:30] in text
            assert lanes.FAULTS[fault][0] not in text, "the answer is not given away"
    assert said(1, "gremlins")[0] == 2 and said(9)[0] == 2


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_lanes_fit_a_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(width=width, file=out)
    for number in range(1, len(RUNS) + 1):
        lanes.show(number, RECORDED["runs"], console)
    lines = out.getvalue().splitlines()
    drawn = [line for line in lines if line.startswith(("host ", "forward "))]
    assert len(drawn) == 2 * len(RUNS) and max(map(len, lines)) <= width
    assert all("L" in line or "P" in line for line in drawn[::2])
    assert "█" in said()[1] and "timeline 6" in said()[1]
