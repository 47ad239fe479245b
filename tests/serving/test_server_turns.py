"""Engines that share one model behind a server: turns, few pages, and two engines side by side."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any
from weakref import ref

import pytest

from common import SamplingParams, TokensPrompt
from milestones.serving.server.turns import Turns
from tests.conftest import EngineFactory, build_engine
from tests.helpers.serving import CHAT, COMPLETE, PATIENCE, Running, Serve, call, hold_steps
from tests.serving.test_server_page import CONFIG, TALK, Watcher, slow_steps, watching

pytestmark = [pytest.mark.extra("serve"), pytest.mark.one_mode]
only_highest = pytest.mark.since("m5_overlap")
PROMPTS = [[11, 12, 13, 14, 15], [7], list(range(40, 60))]


def note_work(engine: Any, name: str, spans: list[tuple[str, float, float]]) -> None:
    """Note when an engine steps, and when its forward thread computes."""
    for owner, method in ((engine, "step"), (engine.core.runner, "run_step")):
        if (original := getattr(owner, method, None)) is None:
            continue

        def noted(*args: Any, original: Any = original) -> Any:
            started = time.perf_counter()
            try:
                return original(*args)
            finally:
                spans.append((name, started, time.perf_counter()))

        setattr(owner, method, noted)


async def tokens_of(thread: Any, name: str) -> list[list[int]]:
    """Return the greedy tokens for all prompts, which an engine gets at the same time."""
    from milestones.serving.server.engine_thread import EngineRequest

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = {f"{name}-{n}": TokensPrompt(ids) for n, ids in enumerate(PROMPTS)}
    box = await thread.open([EngineRequest(n, p, params, 0.0) for n, p in prompts.items()])
    found: dict[str, list[int]] = {}
    async for outputs in box.outputs():
        found |= {output.request_id: output.outputs[0].token_ids for output in outputs}
    return [found[name] for name in prompts]


@pytest.mark.since("m3_paged")
def test_engines_of_one_model_compute_in_turns(make_engine: EngineFactory, serve: Serve) -> None:
    """Neither steps nor forwards in flight overlap, and each has the tokens of an engine alone."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = [o.outputs[0].token_ids for o in make_engine().generate(PROMPTS, params)]
    engine = make_engine(**CONFIG, emulated_forward_ms=3)  # only engines with overlap have it
    run = serve(engine)
    spans: list[tuple[str, float, float]] = []

    async def both() -> list[list[list[int]]]:
        small = await run.api.live.engines.small()
        note_work(small.engine._engine, "small", spans)
        note_work(engine, "first", spans)
        pair = (run.api.engine, "first"), (small.engine, "small")
        found = await asyncio.gather(*(tokens_of(*one) for one in pair))
        run.api.live.engines.release(())
        return found

    assert run.in_loop(both()) == [alone, alone]
    for (name, start, end), (other, begin, until) in combinations(spans, 2):
        assert name == other or end <= begin or until <= start, "two engines computed at once"
    assert {name for name, *_ in spans} == {"first", "small"}


@only_highest
def test_turns_are_in_the_order_of_asking() -> None:
    """An engine that asks again at once does not overtake another one that waits."""
    turns, order = Turns(), []

    def other() -> None:
        with turns.turn():
            order.append("other")

    thread = threading.Thread(target=other)
    with turns.turn():
        thread.start()
        while len(turns._order) < 2:
            time.sleep(0.001)
    with turns.turn():
        order.append("again")
    thread.join(PATIENCE)
    assert order == ["other", "again"]


def small_of(run: Running) -> Any:
    """Return the engine with few pages."""
    return run.api.live.engines._small.result().engine._engine


def choose(page: Watcher, *, small: bool) -> dict[str, Any]:
    """Choose an engine, and return the event with which the page begins again."""
    assert page.post("memory", small=small) == (200, {"small": small})
    begin = page.until("begin")[-1]
    assert begin["small"] is small
    return begin


@pytest.mark.since("m3_paged")
def test_few_pages_until_the_last_page_is_gone(make_engine: EngineFactory, serve: Serve) -> None:
    run = serve(make_engine(**CONFIG))
    engines = run.api.live.engines
    with watching(run) as first:
        with watching(run) as second:
            begin = choose(second, small=True)["begin"]
            few = begin["meta"]["num_pages"]
            assert 0 < few < CONFIG["num_pages"] == first.first["begin"]["meta"]["num_pages"]
            small, thread = ref(small_of(run)), engines._small.result().engine._thread
            pool = ref(small_of(run).core.runner.kv_pool)
            choose(first, small=True)
            assert small_of(run) is small(), "two pages watch one engine"
            second.post("ask", temperature=0, **TALK)
            (end,) = second.until("answers")[-1]["answers"]
            choose(second, small=False)
            assert thread.is_alive()
        body = {**TALK, "temperature": 0}
        assert run.post(CHAT, body)[1]["choices"][0]["message"]["content"] == end["text"]
    run.wait_until(lambda: engines._small is None and not engines._ends)
    gc.collect()
    assert not thread.is_alive() and small() is None and pool() is None, "I3: memory is held"
    assert not engines.first.recorder.is_recording


@only_highest
def test_choosing_an_engine_ends_the_requests(make_engine: EngineFactory, serve: Serve) -> None:
    """The requests of the page on the engine so far are aborted, and count no longer."""
    engine = make_engine(**CONFIG)
    slow_steps(engine, 0.02)
    run = serve(engine)
    with watching(run) as page:
        page.post("crowd", rate=50, system="Be kind.", max_tokens=400)
        asked = page.post("ask", **{**TALK, "max_tokens": 400})[1]["id"]
        run.wait_until(lambda: run.api.open.count > 4)
        assert page.post("memory", small=True)[0] == 200
        run.wait_until(lambda: run.api.open.count == 0)
        (end,) = page.until("answers")[-1]["answers"]
        assert (end["id"], end["reason"]) == (asked, "abort")
        page.post("crowd", rate=50, system="Be kind.", max_tokens=400)
        run.wait_until(lambda: run.api.open.count > 4)  # those of this engine count too
    run.wait_until(lambda: run.api.open.count == 0)


@only_highest
def test_wrong_calls_for_few_pages(serve: Serve) -> None:
    run = serve(max_open_requests=1)
    with watching(run) as page:
        assert page.post("memory", small="yes")[0] == 400
        assert run.post("/live/memory", {"page": "page-99", "small": True})[0] == 404
        with run.api.open.place_for(1):
            assert page.post("memory", small=True)[0] == 429
        assert run.api.live.engines._small is None and run.api.open.count == 0


@pytest.mark.before("m3_paged")
def test_without_pages_there_are_no_few(serve: Serve) -> None:
    run = serve()
    with watching(run) as page:
        status, answer = page.post("memory", small=True)
        assert status == 404 and "no pages" in answer["error"]["message"]


@only_highest
def test_a_server_that_stops_closes_both_engines(serve: Serve) -> None:
    run = serve()
    with watching(run) as page:
        choose(page, small=True)
        thread = run.api.live.engines._small.result().engine._thread
        page.post("crowd", rate=20, system="Be kind.", max_tokens=4)
        page.until("steps")
        run.server.loop.call_soon_threadsafe(run.server._start_draining)
        run.wait_until(lambda: not run.api.engine.is_alive)
        assert not thread.is_alive()


@only_highest
def test_an_engine_with_few_pages_that_fails(make_engine: EngineFactory, serve: Serve) -> None:
    """Its pages are told, the API goes on, and the next one is new."""
    run = serve(make_engine(**CONFIG))
    with watching(run) as page:
        choose(page, small=True)
        failed = ref(small_of(run))
        small_of(run).step = failing
        page.post("ask", **TALK)
        assert "planted" in page.until("error")[-1]["error"]["message"]
    run.wait_until(lambda: run.api.live.engines._small is None)
    assert run.post(COMPLETE, call())[0] == 200
    with watching(run) as page:
        choose(page, small=True)
        assert small_of(run) is not failed()
        page.post("ask", **TALK)
        page.until("answers")


@only_highest
def test_a_step_waits_for_the_other_engine(make_engine: EngineFactory, serve: Serve) -> None:
    """While a step of one engine runs, the other one waits, and commands are still answered."""
    engine = make_engine(**CONFIG)
    run = serve(engine)
    with watching(run) as page:
        choose(page, small=True)
        release = hold_steps(engine)
        answer = run.open(COMPLETE, call(stream=True))  # a client that is gone would be aborted
        run.wait_until(lambda: len(run.api.live.engines._turns._order) == 1)
        page.post("ask", **TALK)
        run.wait_until(lambda: len(run.api.live.engines._turns._order) == 2)
        release()
        page.until("answers")
        answer.close()


# ---- Two engines side by side --------------------------------------------------------------------

BESIDE = "m3_paged"


@contextmanager
def side_by_side(
    make_engine: EngineFactory, serve: Serve
) -> Iterator[tuple[Running, Watcher, Watcher]]:
    """Serve two engines, with a page of each."""
    run = serve(make_engine(**CONFIG), beside=build_engine(BESIDE, **CONFIG))
    with watching(run) as first, watching(run, f"?engine={BESIDE}") as second:
        yield run, first, second


def failing() -> Any:
    raise AssertionError("I3: planted")


def prompts(page: Watcher, events: list[dict[str, Any]]) -> list[str]:
    """Return the prompts of all requests that a page was told of, in the order of their ids."""
    told = [r for e in events for r in e.get("steps", {}).get("requests", [])]
    return sorted({r["request_id"]: r["prompt"] for r in told}.values())


@only_highest
@pytest.mark.before("kv_quant")  # the answers of the engine beside it are others
def test_two_engines_have_one_crowd(make_engine: EngineFactory, serve: Serve) -> None:
    """Each user asks both engines the same: the follow-up too, because the answers are equal."""
    with side_by_side(make_engine, serve) as (run, first, second):
        assert second.first["begin"]["meta"]["engine"] == BESIDE
        names = {first.name, second.name}
        crowd = {"beside": second.name, "system": "Be kind.", "temperature": 0, "max_tokens": 4}
        first.post("crowd", rate=50, **crowd)
        pages = [run.api.live.pages[name] for name in names]
        run.wait_until(lambda: all(page.came["users"] > 5 for page in pages))
        first.post("crowd", rate=0, **crowd)
        run.wait_until(lambda: not any(page._users for page in pages))
        assert pages[0].came == pages[1].came and pages[0].came["refused"] == 0
        asked = []
        for page in (first, second):
            page.post("ask", messages=[{"role": "user", "content": "last"}], max_tokens=1)
            asked.append(prompts(page, page.until("answers")))
        assert asked[0] == asked[1] and len(asked[0]) == 2 * pages[0].came["users"] + 1
        assert run.post("/live/crowd", {"page": second.name, "rate": 1, "system": ""})[0] == 200
        assert pages[0].crowd is not pages[1].crowd


@only_highest
def test_the_api_has_the_first_engine(make_engine: EngineFactory, serve: Serve) -> None:
    with side_by_side(make_engine, serve) as (run, first, second):
        assert run.post(CHAT, {**TALK, "temperature": 0})[0] == 200
        other = run.api.live.engines.named(BESIDE).engine
        assert run.in_loop(other.call(lambda engine: engine.stats().num_steps)) == 0
        for page in (first, second):
            page.post("ask", temperature=0, **TALK)
        ends = [page.until("answers")[-1]["answers"][0]["text"] for page in (first, second)]
        assert ends[0] == ends[1]
        assert run.in_loop(other.call(lambda engine: engine.stats().num_steps)) > 0


@only_highest
def test_wrong_calls_for_two_engines(make_engine: EngineFactory, serve: Serve) -> None:
    with side_by_side(make_engine, serve) as (run, first, second):
        crowd: dict[str, Any] = {"rate": 1, "system": ""}
        for beside, status in (("page-99", 404), (first.name, 400), (7, 400)):
            assert first.post("crowd", beside=beside, **crowd)[0] == status
        assert run.get("/live?engine=m9")[0] == 404
        status, answer = second.post("memory", small=True)
        assert status == 404 and "third" in answer["error"]["message"]
        assert not any(page.crowd for page in run.api.live.pages.values())


@only_highest
@pytest.mark.parametrize("failed", [0, 1])
def test_one_of_two_engines_fails(make_engine: EngineFactory, serve: Serve, failed: int) -> None:
    """Its page is told. The other engine and its part of the crowd go on."""
    with side_by_side(make_engine, serve) as (run, *pages):
        opened = [run.api.live.pages[page.name] for page in pages]
        crowd = {"beside": pages[1].name, "system": "Be kind.", "max_tokens": 4}
        pages[0].post("crowd", rate=50, **crowd)
        pages[failed].until("steps")
        run.in_loop(opened[failed].watched.engine.call(lambda e: setattr(e, "step", failing)))
        assert "planted" in pages[failed].until("error")[-1]["error"]["message"]
        run.wait_until(lambda: opened[failed].is_closed)
        before = opened[1 - failed].came["users"]
        run.wait_until(lambda: opened[1 - failed].came["users"] > before + 5)
        assert run.get("/health")[0] == (503 if failed == 0 else 200)
        pages[1 - failed].post("crowd", rate=0, system="Be kind.")
