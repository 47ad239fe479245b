"""The trace records what happened, and does not change what the engine does."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common import EngineConfig, LLMEngine
from common.displays.demo import parser, recorded
from common.tracing.data import Span, State, TraceData
from common.tracing.forwards import StreamForwards
from common.tracing.live import LiveTrace
from common.tracing.trace import Trace
from milestones.chain import load
from tests.conftest import EngineFactory, shared_model
from tests.helpers.oracle import assert_one_answer, completions, drain, greedy
from tests.helpers.replaced import fail_forward

COMMON = list(range(50, 66))  # all prompts begin with these tokens
PROMPTS = [COMMON + [i] * (2 + 3 * i) for i in range(6)]
CONFIG: dict[str, Any] = {
    "max_num_seqs": 3,
    "page_size": 4,
    "num_pages": 40,
    "max_num_batched_tokens": 48,
}


class Broken(Exception):
    pass


def add_all(engine: LLMEngine, max_tokens: int = 9) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(max_tokens, ignore_eos=True), f"r{number}")


def bare_engine(milestone: str) -> LLMEngine:
    """Return an engine without audit: the audit's own work may run on the engine's stream."""
    config = EngineConfig(model="tiny-llama", device="cpu", **CONFIG)
    return load(milestone).LLMEngine(config, shared_model("tiny-llama"))


def traced_run(engine: LLMEngine) -> TraceData:
    with Trace(engine) as trace:
        add_all(engine)
        drain(engine)
    return trace.data


def assert_nested(spans: list[Span]) -> None:
    """Require that of any two spans of a lane, one contains the other or they do not overlap."""
    open_until: list[float] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        assert span.start <= span.end
        while open_until and open_until[-1] <= span.start:
            open_until.pop()
        assert not open_until or span.end <= open_until[-1], f"{span} overlaps another"
        open_until.append(span.end)


@pytest.mark.before("disaggregated")  # its trace is that of the decode side
def test_the_lanes(milestone: str) -> None:
    with bare_engine(milestone) as engine:
        data = traced_run(engine)
    assert_nested(data.spans)
    assert_nested(data.forwards)
    steps = [span for span in data.spans if span.name == "step"]
    for span in data.spans:
        if span.name not in ("step", "trace"):
            outer = steps[span.step - 1]
            assert outer.start <= span.start and span.end <= outer.end, span
    assert {"schedule", "process"} <= {span.name for span in data.spans}
    ran = [frame.step for frame in data.frames for _batch in frame.batches]
    assert [span.step for span in data.forwards] == ran
    # With overlap, a step may be launched for requests that have ended, as a later result shows.
    assert len(ran) >= engine.stats().num_steps


@pytest.mark.before("m5_overlap")
def test_one_forward_a_step(make_engine: EngineFactory) -> None:
    engine = make_engine(**CONFIG)
    data = traced_run(engine)
    assert len(data.forwards) == engine.stats().num_steps
    assert all(len(frame.batches) == 1 for frame in data.frames[1:])


def test_the_engine_does_not_notice(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(**CONFIG)
    parts = [engine, engine.core.scheduler, engine.output_processor, engine.core.runner]
    if tree := getattr(getattr(engine.core.scheduler, "kv_cache", None), "radix_cache", None):
        parts.append(tree)
    methods = [set(vars(part)) for part in parts]
    hooks = len(shared_model("tiny-llama").model._forward_hooks)
    traced = engine.generate(PROMPTS, greedy(9))
    with Trace(engine), Trace(engine), LiveTrace(engine):
        again = engine.generate(PROMPTS, greedy(9))
    assert [set(vars(part)) for part in parts] == methods, "a wrapper was left behind"
    assert len(shared_model("tiny-llama").model._forward_hooks) == hooks
    for one, two in zip(traced, again, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
    for output in engine.generate(PROMPTS, greedy(9)):
        assert_one_answer("tiny-llama", output, 9)


def test_a_failed_step_is_recorded(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = make_engine(**CONFIG)
    fail_forward(monkeypatch, shared_model("tiny-llama"), 4, Broken)
    names = set(vars(engine))
    with Trace(engine) as trace:
        add_all(engine)
        while "Broken" not in [frame.error for frame in trace.data.frames]:
            engine.step()
    assert [frame.error for frame in trace.data.frames if frame.error] == ["Broken"]
    assert set(vars(engine)) == names
    with Trace(engine) as trace:  # this trace begins with requests in flight and earlier forwards
        finals = completions(engine)
    assert {info.request_id for info in trace.data.requests} == set(finals)
    assert all(info.end is not None for info in trace.data.requests)
    assert_nested(trace.data.forwards)
    assert {found.finish_reason for found in finals.values()} == {"length"}


@pytest.mark.before("disaggregated")  # its trace is that of the decode side
def test_a_model_may_be_shared(milestone: str) -> None:
    """The trace does not have the forwards of another engine on the same model."""
    with bare_engine(milestone) as engine, bare_engine(milestone) as other:
        with Trace(engine) as trace:
            other.generate([1, 2, 3], greedy(4))
            engine.generate([1, 2, 3], greedy(4))
        assert len(trace.data.forwards) == engine.stats().num_steps


def test_an_instances_own_method_comes_back(make_engine: EngineFactory) -> None:
    engine: Any = make_engine()
    step = engine.step
    engine.step = own = lambda: step()
    with Trace(engine):
        engine.generate([1, 2], greedy(2))
    assert engine.step is own


def test_spans_of_a_stream_come_late_and_once() -> None:
    """Another thread appends the spans, and the oldest spans are dropped."""
    spans = deque([(1.0, 2.0)], maxlen=3)
    forwards = StreamForwards(spans)
    assert forwards.take() == []
    spans.extend([(3.0, 4.0), (5.0, 6.0), (7.0, 8.0)])
    assert forwards.take() == [(3.0, 4.0), (5.0, 6.0), (7.0, 8.0)]
    spans.append((9.0, 10.0))
    assert forwards.take() == [(9.0, 10.0)]
    assert forwards.take() == []


@pytest.mark.since("m5_overlap")
@pytest.mark.before("speculative")
def test_a_forward_goes_to_the_step_that_scheduled_it(milestone: str) -> None:
    """A forward belongs to the step that scheduled it, even if it runs during the next step."""
    with bare_engine(milestone) as engine:
        data = traced_run(engine)
    scheduled = [frame.step for frame in data.frames for _ in frame.batches]
    assert len(scheduled) > len(set(scheduled)), "no step scheduled two forwards"
    assert [span.step for span in data.forwards] == scheduled


def test_what_a_demo_writes(make_engine: EngineFactory, tmp_path: Path) -> None:
    trace, player = tmp_path / "trace.json", tmp_path / "player.html"
    args = parser("A demo.", requests=1, max_tokens=1).parse_args(
        ["--trace", str(trace), "--player", str(player)]
    )
    assert not trace.exists() and not player.exists(), "a file was written before the run"
    engine = make_engine()
    console = Console(record=True, quiet=True)
    with pytest.raises(Broken):
        with recorded(engine, args, console):
            engine.generate([1, 2], greedy(3))
            raise Broken
    assert json.loads(trace.read_text())["otherData"]["machine"]
    assert "<title>" in player.read_text()


@pytest.mark.parametrize("flag", ["--trace", "--player"])
def test_a_demo_refuses_a_path_that_cannot_be_written(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "no" / "file", tmp_path):
        with pytest.raises(SystemExit) as refused:
            parser("A demo.", requests=1, max_tokens=1).parse_args([flag, str(path)])
        assert refused.value.code == 2
        assert f"argument {flag}: cannot write {path}" in capsys.readouterr().err


# ---- A trace that is read while it is recorded ---------------------------------------------------


def seen(state: State) -> dict[str, Any]:
    """Return what a reader sees of a state, without requests that have ended."""
    live = {n: r for n, r in state.requests.items() if r["state"] in ("prefill", "decode")}
    return {
        "waiting": state.waiting, "live": live, "pages": state.pages, "nodes": state.nodes,
        "stats": state.stats,
    }  # fmt: skip


def read(trace: LiveTrace, state: State, step: int) -> int:
    """Apply what was recorded after a step. Return the newest step."""
    part = trace.since(step)
    assert part is not None
    for frame in part.frames:
        assert frame.step == step + 1
        state.apply(frame)
        step = frame.step
    return step


def begun(snapshot: TraceData) -> State:
    state = State()
    state.apply(snapshot.frames[0])
    return state


@pytest.mark.electives
def test_a_snapshot_and_its_steps_agree_with_a_later_snapshot(make_engine: EngineFactory) -> None:
    """Readers that join at different steps see the same state, in a pool that is too small."""
    engine: Any = make_engine(**{**CONFIG, "num_pages": 18})
    with LiveTrace(engine) as trace:
        readers = [(begun(trace.snapshot()), 0)]
        add_all(engine)
        while engine.has_unfinished_requests():
            engine.step()
            readers = [(state, read(trace, state, step)) for state, step in readers]
            snapshot = trace.snapshot()
            fresh = begun(snapshot)
            for state, step in readers:
                assert step == snapshot.frames[0].step
                assert seen(state) == seen(fresh)
            if len(readers) < 6:
                readers.append((fresh, snapshot.frames[0].step))


def test_requests_come_with_their_times(make_engine: EngineFactory) -> None:
    """A request comes when it is new, with its first token, and at its end; and not otherwise."""
    engine = make_engine(**CONFIG)
    with LiveTrace(engine) as trace:
        add_all(engine)
        drain(engine)
        part = trace.since(0)
    assert part is not None
    for number in range(6):
        told = [info for info in part.requests if info.number == number]
        assert 2 <= len(told) <= 3
        assert told[-1].first_token is not None and told[-1].finish_reason == "length"


def test_memory_is_bounded(make_engine: EngineFactory) -> None:
    """Old steps are dropped. A reader that missed one is told, and nothing else is kept."""
    engine = make_engine(**CONFIG)
    with LiveTrace(engine, steps_kept=8) as trace:
        for _ in range(3):
            add_all(engine)
            drain(engine)
        newest = trace.snapshot().frames[0].step
        assert newest > 20
        kept = trace.since(newest - 8)
        assert kept is not None and len(kept.frames) == 8
        assert trace.since(newest - 9) is None
        nothing = trace.since(newest)
        assert nothing is not None and not nothing.frames
        data, observer = trace.data, trace._observer
        assert not (data.requests or data.frames or data.spans or data.forwards)
        assert not (observer._infos or observer._moved or observer._before.requests)
        assert trace.snapshot().requests == []
