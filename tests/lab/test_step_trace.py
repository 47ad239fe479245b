"""Traces of one step: the times of names, the table, and the recording of an engine."""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common.tracing.chrome import chrome_trace
from common.tracing.trace import Trace
from milestones.course.project import attribute
from milestones.lab.bench import step_trace
from milestones.lab.bench.peers import trace_vllm, with_vllm
from milestones.lab.instruments.chrome_spans import ChromeTrace, Span, read, self_times
from tests.conftest import ROOT, EngineFactory
from tests.helpers.oracle import drain, greedy

LANE = ("1", "1")
PROJECT = ROOT / "milestones/project"


def event(name: str, start: float, duration: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    more = {"pid": 1, **more}
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "tid": thread, **more}


# A step of 100 us. The first lane has two parts, one of them with a part inside, and 10 us without
# a name. The second lane begins before the step and goes on after it.
EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "worker"}},
    event("profiler", 0, 900, cat="Trace", pid="Spans", thread=9),
    event("step", 100, 100),
    event("a", 105, 50),
    event("b", 110, 20),
    event("a", 155, 40),
    event("forward", 50, 100, 2),
    event("forward", 180, 100, 2),
    event("waiting", 100, 100, 7, pid=2),
    {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "requests"}},
    {"ph": "C", "name": "pages", "ts": 120, "pid": 1, "args": {"free": 3}},
    event("step", 200, 30),
    event("step", 300, 400),
]


def times(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the time of each name in the median step, by the name of the lane or its thread."""
    trace = ChromeTrace.of({"traceEvents": events})
    step = trace.step()
    return {
        trace.names.get(lane, lane[1]): {part.name: part.time for part in parts}
        for lane, parts in trace.parts(step).items()
    }


def test_nested_spans_count_once_and_lanes_are_separate() -> None:
    assert times(EVENTS) == {"1": {"a": 70, "b": 20}, "worker": {"forward": 70}}


def test_a_span_that_ends_after_the_span_around_it_counts_once() -> None:
    step = Span("step", LANE, 0, 10)
    spans = [step, Span("a", LANE, 0, 6), Span("b", LANE, 4, 9), Span("a", LANE, 9, 30)]
    found = {part.name: part.time for part in self_times(spans, step)}
    assert found == {"a": 5, "b": 5}


def test_a_step_is_chosen_by_its_number_or_its_name() -> None:
    trace = ChromeTrace.of(EVENTS)
    assert trace.step(2).start == 200 and trace.step(name="fo").name == "forward"
    with pytest.raises(ValueError, match="from 1 to 3, got 4"):
        trace.step(4)
    with pytest.raises(ValueError, match="name one with --span"):
        trace.step(name="nothing")
    with pytest.raises(ValueError, match="no complete events"):
        ChromeTrace.of([])


def show(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    parser = argparse.ArgumentParser()
    attribute.add_arguments(parser)
    assert attribute.main(parser.parse_args([str(word) for word in words])) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("compressed", [False, True])
def test_the_table_of_a_file(
    compressed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.dumps({"traceEvents": EVENTS}).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(data) if compressed else data)
    lines = [line.split() for line in show(capsys, path, "--top", 1).splitlines()]
    assert ["a", "2", "0.070", "70.0%"] in lines
    assert ["1", "more", "names", "1", "0.020", "20.0%"] in lines
    assert ["(no", "name)", "0.010", "10.0%"] in lines
    assert ["covered:", "90.0%", "of", "the", "step"] in lines
    path.write_text("no trace")
    with pytest.raises(ValueError, match="is not a Chrome trace"):
        read(path)


def test_a_trace_of_torch_is_read(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function("step"):
                torch.ones(30, 30).matmul(torch.ones(30, 30))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = ChromeTrace.of(read(tmp_path / "trace.json"))
    step = trace.step(2)
    parts = trace.parts(step)[step.lane]
    assert "aten::mm" in {part.name for part in parts}
    assert 0 < attribute.covered(parts, step.end - step.start) <= 1


@pytest.mark.since("m5_overlap")
def test_a_trace_of_ours_is_read(make_engine: EngineFactory) -> None:
    engine = make_engine()
    with Trace(engine) as recorded:
        engine.add_request([5, 6, 7], greedy(6, ignore_eos=True))
        drain(engine)
    trace = ChromeTrace.of(chrome_trace(recorded.data))
    parts = trace.parts(trace.step(2))
    assert {trace.names[lane] for lane in parts} >= {"CPU"}
    assert not {part.name for found in parts.values() for part in found} & {"decode", "waiting"}


@pytest.mark.parametrize("layers", [False, True])
def test_steps_of_m5_are_recorded(layers: bool, tmp_path: Path) -> None:
    """All five steps are read: a forward may begin after the end of the step that launches it."""
    document = step_trace.record("m5_overlap", "tiny-llama", tmp_path, layers=layers)
    lanes: dict[tuple[str, str], set[str]] = {}
    for span in ChromeTrace.of(document).spans:
        lanes.setdefault(span.lane, set()).add(span.name)
    host, forward = ({lane for lane in lanes if name in lanes[lane]} for name in step_trace.LANES)
    assert len(host) == len(forward) == 1 and host != forward, "two threads"
    assert {"wait", "schedule", "process"} <= lanes[host.pop()]
    assert {"forward", "choose"} <= lanes[forward.pop()]


def test_the_third_step_is_kept_with_the_spans_that_touch_it() -> None:
    steps = [event("step", 100 * number, 100) for number in range(step_trace.STEPS)]
    forwards = [event("run_step", 100 * number + 90, 80, 2) for number in range(4)]
    meta = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "python"}}
    trace = ChromeTrace.of(step_trace.third_step({"traceEvents": [meta, *steps, *forwards]}))
    step = trace.step()
    assert trace.step(1) == step and step.start == 0, "one step, from 0 on"
    assert list(trace.names.values()) == ["host", "forward"]
    [[forward]] = trace.parts(step).values()
    assert (forward.name, forward.count, forward.time) == ("run_step", 2, 80)


@pytest.mark.parametrize("name", ["m5", "vllm"])
def test_the_page_has_the_table_of_its_recording(name: str) -> None:
    file = PROJECT / f"step_{name}.json.gz"
    document = read(file)
    assert file.stat().st_size < 300_000
    page = (PROJECT / "README.md").read_text(encoding="utf-8")
    mark = f"step of {document['otherData']['engine']} -->"
    block = page.partition(f"<!-- {mark}\n")[2].partition(f"\n<!-- /{mark}")[0]
    assert block == "\n".join(step_trace.lines_of(document)), f"step_trace {name} FILE --readme"
    trace = ChromeTrace.of(document)
    step = trace.step()
    for lane, parts in trace.parts(step).items():
        share = attribute.covered(parts, step.end - step.start)
        assert share >= attribute.ENOUGH, f"{trace.names[lane]}: {share:.1%} is covered"


def test_vllm_records_steps_in_which_all_requests_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's interface is a fake: settings, the calls in order, and no step besides them."""
    calls: list[str] = []
    made: dict[str, Any] = {}

    def llm_of(model: str, **more: Any) -> Any:
        made.update(more, model=model)

        def step() -> list[Any]:
            calls.append("step")
            return []

        engine = SimpleNamespace(add_request=lambda *_: calls.append("add"), step=step)
        return SimpleNamespace(
            llm_engine=engine,
            start_profile=lambda: calls.append("start"),
            stop_profile=lambda: calls.append("stop"),
        )

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    fake = SimpleNamespace(llm_of=llm_of, Engine=with_vllm.Engine)
    monkeypatch.setattr(trace_vllm.importlib, "import_module", lambda name: fake)
    monkeypatch.setattr(sys, "argv", ["trace_vllm.py", "/model", "/folder"])
    monkeypatch.setattr(trace_vllm.json, "load", lambda _: {"prompts": [[1, 2], [3]]})
    trace_vllm.main()
    steps = ["step"] * trace_vllm.STEPS
    warm_up = ["step"] * trace_vllm.WARM_UP_STEPS
    assert calls == ["add", "add", *warm_up, "start", *steps, "stop"]
    assert made["model"] == "/model"
    assert made["profiler_config"]["torch_profiler_dir"] == "/folder"


def test_the_trace_of_vllm_is_found_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> None:
        folder = Path(command[-1])
        (folder / "other.json").write_text("{}")
        data = json.dumps({"traceEvents": EVENTS}).encode()
        (folder / "rank0.1.pt.trace.json.gz").write_bytes(gzip.compress(data))

    monkeypatch.setattr(subprocess, "run", run)
    document = step_trace.record_vllm(Path("python"), "tiny-llama", tmp_path)
    assert document == {"traceEvents": EVENTS}
