"""priority: preemption, the copies of pages on the host, and random schedules with both."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from common import Request
from milestones.instruments.audit import assert_idle
from milestones.instruments.forced_retractions import force_retractions
from milestones.instruments.streams import EarlyStream, LateStream
from tests.conftest import EngineFactory, ModuleOf, build_engine
from tests.fake_overlap import expected_output, hash_engine, text_of
from tests.oracle import assert_one_answer, drain, greedy

pytestmark = pytest.mark.since("priority")

SCHEDULES = 1000
STREAMS = (LateStream, EarlyStream)
STEMS: tuple[list[int], ...] = ([], [1] * 12, [1] * 5 + [2] * 9, [3] * 24)


def cache_of(engine: Any) -> Any:
    return engine.scheduler.kv_cache.radix_cache


def resize_host(engine: Any, num_pages: int) -> None:
    """Give an engine that has not run yet so many host pages."""
    cache = cache_of(engine)
    cache.num_host_pages, cache.free_host_pages = num_pages, list(range(num_pages))


def check_copies(engine: Any) -> None:
    """I3: where a page is in the pool and on the host, both have the same keys and values."""
    cache, runner = cache_of(engine), engine.runner
    if cache.transfers or (runner.copied is not None and not runner.copied.is_done):
        return
    page_keys = vars(__import__(type(cache).__module__, fromlist=["page_keys"]))["page_keys"]
    for node in cache.nodes():
        tokens = [token for part in node.path() for token in part.tokens]
        for key, page in zip(page_keys(tokens, cache.page_size), node.prefix_pages(), strict=True):
            if key in cache.copies:
                slots = range(page * cache.page_size, (page + 1) * cache.page_size)
                expected = [runner.memory[slot] for slot in slots]
                assert runner.host_pool.pages[cache.copies[key]] == expected, "I3: copies differ"


def fuzz(module: Any, seed: int, forwards: type[LateStream], copies: type[LateStream]) -> Any:
    """Run one random schedule with priorities, on few pages of either pool; audit each step."""
    chance = random.Random(seed)
    page_size, longest = chance.choice([1, 2, 3, 4]), chance.choice([6, 20, 40])
    num_pages = -(-longest // page_size) + chance.choice([0, 1, 2, 10, 40])
    engine = hash_engine(
        module, forwards(), num_pages, page_size=page_size, max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm"]),
    )  # fmt: skip
    engine.runner.copy_stream = copies()
    resize_host(engine, chance.choice([0, 2, num_pages // 2, 2 * num_pages, 200]))
    force_retractions(engine.scheduler, chance.choice([None, None, None, 2, 7]))
    expected: dict[str, list[int]] = {}
    finals: dict[str, Any] = {}
    aborted: set[str] = set()
    to_come, steps = chance.randint(4, 14), 0
    while to_come or engine.has_unfinished_requests():
        steps += 1
        assert steps < 20_000, "I5: the schedule does not end"
        while to_come and chance.random() < 0.35:
            to_come -= 1
            tail = [chance.randrange(50) for _ in range(longest)]
            prompt = [*chance.choice(STEMS), *tail][: chance.randint(1, longest)]
            max_tokens = chance.choice([1, 2, 5, 12, 30])
            stops = chance.sample(range(50), chance.choice([0, 0, 3, 10]))
            stop = text_of([chance.randrange(50)]) if chance.random() < 0.2 else ""
            params = greedy(max_tokens, stop_token_ids=stops, stop=stop or (), ignore_eos=True)
            name = engine.add_request(prompt, params, priority=chance.choice([0, 0, 1, -3, 7]))
            capacity = min(max_tokens, num_pages * page_size + 1 - len(prompt))
            expected[name] = expected_output(prompt, capacity, stops, stop)
        live = sorted(expected.keys() - finals.keys())
        if live and chance.random() < 0.08 and engine.abort_request(victim := chance.choice(live)):
            aborted.add(victim)
        if chance.random() < 0.01:
            engine.reset_prefix_cache()
        for output in engine.step():
            assert output.request_id not in finals, "a request has an output after its final one"
            if output.finished:
                finals[output.request_id] = output.outputs[0]
        check_copies(engine)
    for name, completion in finals.items():
        tokens = completion.token_ids
        wanted = expected[name][: len(tokens)] if name in aborted else expected[name]
        assert tokens == wanted, f"I1, I2: schedule {seed}, {name}"
    assert finals.keys() == expected.keys(), "I5: a request has no final output"
    assert_idle(engine)
    return engine


@pytest.mark.parametrize("copies", STREAMS)
@pytest.mark.parametrize("forwards", STREAMS)
def test_random_schedules_with_priorities(
    module_of: ModuleOf, forwards: type[LateStream], copies: type[LateStream]
) -> None:
    """A thousand schedules are exact to the token, whenever forwards and copies run."""
    module = module_of("engine")
    first = SCHEDULES // 4 * (2 * STREAMS.index(forwards) + STREAMS.index(copies))
    engines = [fuzz(module, first + i, forwards, copies) for i in range(SCHEDULES // 4)]
    assert sum(e.scheduler.retraction.num_preemptions for e in engines) > 100
    assert sum(cache_of(e).num_written for e in engines) > 500
    assert sum(cache_of(e).num_loaded for e in engines) > 100
    assert sum(e.stats().num_retractions for e in engines) > 100
