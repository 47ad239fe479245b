"""The frames of a trace agree with the engine: its requests, pages, slots and radix tree."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from common.tracing.chrome import chrome_trace
from common.tracing.data import State, TraceData
from common.tracing.forced_retractions import force_retractions
from common.tracing.live import LiveTrace
from common.tracing.trace import Trace
from tests.conftest import EngineFactory
from tests.displays.test_trace import CONFIG, add_all, begun, read, traced_run
from tests.helpers.oracle import drain, greedy


@pytest.mark.before("disaggregated")  # a request that waits for its pages runs, and has no state
def test_frames_agree_with_the_engine(make_engine: EngineFactory) -> None:
    engine = make_engine(**CONFIG)
    stats, outputs = [asdict(engine.stats())], {}
    with Trace(engine) as trace:
        add_all(engine)
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step()})
            stats.append(asdict(engine.stats()))
    seen = 0
    for frame, state in trace.data.states():
        assert state.stats == stats[frame.step]
        running = [r for r in state.requests.values() if r["state"] in ("prefill", "decode")]
        assert len(running) == state.stats["num_running"]
        assert len(state.waiting) == state.stats["num_waiting"]
        seen += 1
    assert seen == len(stats)
    for number, info in enumerate(trace.data.requests):
        output, final = outputs[info.request_id], state.requests[number]
        assert final["text"] == output.outputs[0].text
        assert final["state"] == info.finish_reason == output.outputs[0].finish_reason
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        assert (info.num_prompt_tokens, final["tokens"]) == (
            len(output.prompt_token_ids),
            len(tokens),
        )
    scheduled = sum(sum(b.values()) for frame in trace.data.frames for b in frame.batches)
    assert scheduled == state.stats["prefill_tokens"] + state.stats["decode_tokens"]


def replayed(data: TraceData) -> State:
    state = State()
    for frame in data.frames:
        state.apply(frame)
    return state


@pytest.mark.since("m3_paged")
@pytest.mark.before("disaggregated")  # its pages are allocated between two frames, too
def test_each_page_has_its_owner(make_engine: EngineFactory) -> None:
    """The sum of the frames is the memory, after each step of a small pool: pages are evicted.

    A frame looks only at rows that changed. With a tree, the second prompts are cached.
    """
    engine: Any = make_engine(**{**CONFIG, "num_pages": 18})
    force_retractions(engine.core.scheduler, 3)
    kv_cache, evicted = engine.core.scheduler.kv_cache, 0
    with LiveTrace(engine) as trace:
        state, step = begun(trace.snapshot()), 0
        for max_tokens in (9, 5):
            add_all(engine, max_tokens)
            while engine.has_unfinished_requests():
                engine.step()
                before = {*state.nodes}
                step = read(trace, state, step)
                evicted += len(before - state.nodes.keys())
                assert_pages(state, kv_cache)
                numbers = {info.request_id: info.number for info in trace.snapshot().requests}
                for request in engine.core.scheduler.running:
                    assert_pages_of(request, numbers[request.request_id], state, kv_cache)
    assert evicted or not hasattr(kv_cache, "radix_cache"), "nothing was evicted"


def assert_pages(state: State, kv_cache: Any) -> None:
    """Require that the pages and the tree of a state are those of an engine."""
    held = set(range(1, kv_cache.allocator.num_pages + 1)) - set(kv_cache.allocator.free_pages)
    assert set(state.pages) == held
    tree = getattr(kv_cache, "radix_cache", None)
    nodes = {} if tree is None else {tuple(n.pages): n for n in tree.nodes()}
    cached = {page for pages in nodes for page in pages}
    assert {page for page, owner in state.pages.items() if owner == "tree"} == cached
    assert len(state.nodes) == len(nodes)
    for node in state.nodes.values():
        real = nodes[tuple(node["pages"])]
        assert (node["locks"], node["hits"]) == (real.lock_count, real.hits)
        parent = state.nodes.get(node["parent"], {"pages": []})
        assert parent["pages"] == real.parent.pages


def assert_pages_of(request: Any, number: int, state: State, kv_cache: Any) -> None:
    """Require that a running request has its own pages in a state, and its node of the tree."""
    own = {page for page, owner in state.pages.items() if owner == number}
    shared = {page for page, owner in state.pages.items() if owner == "tree"}
    assert own == set(kv_cache.pages_of(request)) - shared
    held, tree = state.requests[number].get("node"), getattr(kv_cache, "radix_cache", None)
    assert (held is None) == (tree is None or kv_cache.last_nodes[request.row] is tree.root)
    if held is not None:
        assert state.nodes[held]["pages"] == kv_cache.last_nodes[request.row].pages


@pytest.mark.since("hybrid_memory")
@pytest.mark.parametrize("model", ["tiny-gemma3_text", "tiny-qwen3_next"])
def test_each_page_of_all_groups_has_its_owner(make_engine: EngineFactory, model: str) -> None:
    """A block may have a page in each group of layers. No page that is in use is shown as free."""
    engine: Any = make_engine(model, **{**CONFIG, "num_pages": 60})
    kv_cache = engine.core.scheduler.kv_cache
    with Trace(engine) as trace:
        add_all(engine)
        while engine.has_unfinished_requests():
            engine.step()
            state = replayed(trace.data)
            free = set(kv_cache.allocator.free_pages)
            assert set(state.pages) == set(range(1, 61)) - free
            drawn = {page for node in state.nodes.values() for page in node["pages"]}
            assert drawn == {page for page, owner in state.pages.items() if owner == "tree"}
            assert len(free) == state.stats["kv_pages_free"]


def test_each_slot_has_its_owner(make_engine: EngineFactory, milestone: str) -> None:
    engine: Any = make_engine(**CONFIG)
    with Trace(engine) as trace:
        add_all(engine)
        for _ in range(4):
            engine.step()
    state, meta = replayed(trace.data), trace.data.meta
    for request in engine.core.scheduler.running:
        now = state.requests[int(request.request_id[1:])]
        assert (now.get("row"), now["computed"]) == (request.row, request.num_computed_tokens)
    assert ("row_tokens" in meta) == (milestone == "m2_continuous")


def lanes_of(data: TraceData) -> dict[str, list[dict[str, Any]]]:
    """Return the events of each request in the Chrome trace, in order of time."""
    events = json.loads(json.dumps(chrome_trace(data)))["traceEvents"]
    for event in events:
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = [e for e in events if e["pid"] == 2 and e["name"] == "thread_name"]
    return {
        name["args"]["name"].partition(" · ")[0]: [
            e for e in events if (e["pid"], e["tid"]) == (2, name["tid"]) and e["ph"] in "Xi"
        ]
        for name in names
    }


def test_every_request_has_one_end(make_engine: EngineFactory) -> None:
    """This includes requests aborted while they wait or run, or before the first step."""
    engine = make_engine(**CONFIG)
    with Trace(engine) as trace:
        add_all(engine)
        engine.abort_request("r5")
        engine.step()
        engine.step()
        engine.abort_request("r0")
        engine.abort_request("r4")
        engine.add_request([5, 6], greedy(1), "one")  # its first token is its last
        drain(engine)
        engine.add_request([7], greedy(3), "r0")  # the same name again
        engine.abort_request("r0")
    data = trace.data
    aborted = [r.request_id for r in data.requests if r.finish_reason == "abort"]
    assert aborted == ["r0", "r4", "r5", "r0"]
    assert replayed(data).requests[len(data.requests) - 1]["state"] == "abort"
    lanes = lanes_of(data)
    for number, lane in enumerate(lanes.values()):
        if number == 0:
            continue  # its name is used twice
        phases = [event for event in lane if event["ph"] == "X"]
        (end,) = [event for event in lane if event["ph"] == "i"]
        for phase, following in pairwise(phases):
            assert phase["ts"] + phase["dur"] == pytest.approx(following["ts"], abs=0.01)
        assert end["ts"] == pytest.approx(phases[-1]["ts"] + phases[-1]["dur"], abs=0.01)
    assert [e["name"] for e in lanes["r2"]] == ["waiting", "prefill", "decode", "finish (length)"]
    assert [e["name"] for e in lanes["r5"]] == ["waiting", "abort"]
    drain(engine)


@pytest.mark.before("disaggregated")  # its trace is that of the decode side
def test_a_forward_has_a_name_and_a_colour(make_engine: EngineFactory) -> None:
    """The name says how many tokens it computes, and the colour whether they are of prompts."""
    engine = make_engine(**CONFIG)
    with Trace(engine) as trace:
        engine.add_request([5, 6, 7], greedy(3), "one")
        drain(engine)
    events = chrome_trace(trace.data)["traceEvents"]
    forwards = [event for event in events if event["name"].startswith("forward ")]
    counts = [event["name"].partition(" · ")[2] for event in forwards]
    assert counts == ["3 tokens", "1 token", "1 token"]
    assert [event["cat"] for event in forwards] == ["prefill", "decode", "decode"]
    assert forwards[0]["cname"] != forwards[1]["cname"]


@pytest.mark.since("m3_paged")
def test_retractions_show(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(**CONFIG)
    force_retractions(engine.core.scheduler, 3)
    data = traced_run(engine)
    retracted = [n for frame in data.frames for n in frame.retracted]
    assert len(retracted) == engine.stats().num_retractions > 0
    lanes = lanes_of(data)
    for number, lane in enumerate(lanes.values()):
        names = [event["name"] for event in lane if event["ph"] == "i"]
        assert names.count("retracted") == retracted.count(number)
        assert names[-1] == "finish (length)"
