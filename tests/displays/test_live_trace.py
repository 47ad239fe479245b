"""A trace that is read while it is recorded: snapshots, steps, and its bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from common.tracing.data import State, TraceData
from common.tracing.live import LiveTrace
from tests.conftest import EngineFactory
from tests.displays.test_trace import CONFIG, add_all
from tests.helpers.oracle import drain


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
