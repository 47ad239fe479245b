"""A trace that is read while it is recorded: snapshots, steps, and its bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from common.tracing.data import State, TraceData
from common.tracing.forced_retractions import force_retractions
from common.tracing.live import LiveTrace
from tests.conftest import EngineFactory, shared_model
from tests.displays.test_trace import CONFIG, add_all
from tests.helpers.oracle import drain, greedy


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


@pytest.mark.since("m3_paged")
def test_pages_are_right_after_each_step(make_engine: EngineFactory) -> None:
    """A frame looks only at rows that changed. The sum of frames is still the whole memory."""
    engine: Any = make_engine(**{**CONFIG, "num_pages": 24})
    force_retractions(engine.core.scheduler, 3)
    kv_cache = engine.core.scheduler.kv_cache
    tree = getattr(kv_cache, "radix_cache", None)
    with LiveTrace(engine) as trace:
        state, step = begun(trace.snapshot()), 0
        for max_tokens in (9, 5):  # with a tree, the second prompts are cached
            add_all(engine, max_tokens)
            while engine.has_unfinished_requests():
                engine.step()
                step = read(trace, state, step)
                cached = {page for node in tree.nodes() for page in node.pages} if tree else set()
                assert {p for p, owner in state.pages.items() if owner == "tree"} == cached
                held = {page for row in kv_cache.table.rows for page in row}
                assert set(state.pages) == held | cached
                numbers = {info.request_id: info.number for info in trace.snapshot().requests}
                for request in engine.core.scheduler.running:
                    number = numbers[request.request_id]
                    own = {page for page, owner in state.pages.items() if owner == number}
                    assert own == set(kv_cache.pages_of(request)) - cached


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


def test_a_live_trace_leaves_nothing_behind(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(**CONFIG)
    parts = [engine, engine.core.scheduler, engine.output_processor, engine.core.runner]
    if tree := getattr(getattr(engine.core.scheduler, "kv_cache", None), "radix_cache", None):
        parts.append(tree)
    before = [set(vars(part)) for part in parts]
    hooks = len(shared_model("tiny-llama").model._forward_hooks)
    with LiveTrace(engine):
        engine.generate([1, 2, 3], greedy(3))
    assert [set(vars(part)) for part in parts] == before, "a wrapper was left behind"
    assert len(shared_model("tiny-llama").model._forward_hooks) == hooks
