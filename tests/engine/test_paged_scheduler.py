"""The paged scheduler without a model, on a memory of hashes: budgets, chunks, retraction."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

from common.tracing.forced_retractions import force_retractions
from tests.conftest import ModuleOf, schedules
from tests.helpers.fake_paged import FakePagedEngine, expected_tokens
from tests.helpers.random_schedule import random_prompt, random_sizes
from tests.helpers.replaced import plant

SCHEDULES = schedules(1200)

pytestmark = pytest.mark.since("m3_paged")


def fuzz(scheduler: ModuleType, seed: int) -> FakePagedEngine:
    """Run one random schedule of sizes, arrivals, aborts and forced retractions."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance, (1, 2, 3, 4, 16))
    engine = FakePagedEngine(
        scheduler, num_pages, page_size=page_size, max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.choice([1, 2, 3, 5, 16, 17, 64]),
    )  # fmt: skip
    force_retractions(engine.scheduler, chance.choice([None, None, 1, 2, 7]))
    expected: dict[str, list[int]] = {}
    to_come, steps = chance.randint(1, 10), 0
    while to_come or engine.live:
        steps += 1
        assert steps < 20_000, "I5: the schedule does not end"
        while to_come and chance.random() < 0.4:
            to_come -= 1
            prompt, max_tokens = random_prompt(chance, longest), chance.choice([1, 2, 5, 12, 30])
            name = f"{to_come}"
            engine.add(name, prompt, max_tokens)
            capacity = num_pages * page_size + 1 - len(prompt)
            expected[name] = expected_tokens(prompt, min(max_tokens, capacity))
        if engine.live and chance.random() < 0.03:
            victim = chance.choice(sorted(engine.live))
            engine.abort(victim)
            del expected[victim]
        engine.step()
    assert engine.finished == expected, f"I1, I2: schedule {seed}"
    kv_cache = engine.scheduler.kv_cache
    assert kv_cache.num_free_pages == num_pages, "I3: pages are lost"
    return engine


def test_random_schedules(module_of: ModuleOf) -> None:
    """More than a thousand schedules are exact to the token. Every step is audited."""
    retractions = sum(
        fuzz(module_of("scheduler"), seed).scheduler.counters.num_retractions
        for seed in range(SCHEDULES)
    )
    assert retractions > SCHEDULES, "too few retractions"


def a_resumed_request_keeps_its_position(send_back: Any, self: Any, request: Any) -> None:
    computed = request.num_computed_tokens
    send_back(self, request)
    request.num_computed_tokens = min(computed, 1)


def a_page_is_freed_twice(free: Any, self: Any, request: Any) -> None:
    pages = list(self.pages_of(request))
    free(self, request)
    self.allocator.free(pages[:1])


def a_page_too_few(allocate_slots: Any, self: Any, request: Any, num_tokens: int) -> None:
    allocate_slots(self, request, max(0, num_tokens - 1) or 1)


def sampled_before_the_last_chunk(add: Any, self: Any, batch: Any, request: Any, n: int) -> None:
    add(self, batch, request, n)
    if batch.requests and len(batch.requests) - 1 not in batch.sampled_indices:
        batch.sampled_indices.append(len(batch.requests) - 1)


def a_stale_page_table(take_updates: Any, self: Any) -> Any:
    return take_updates(self)[:-1]


@pytest.mark.parametrize(
    ("module", "method", "bug"),
    [
        ("scheduler", "Scheduler.send_back", a_resumed_request_keeps_its_position),
        ("kv_cache", "KVCacheManager.free", a_page_is_freed_twice),
        ("kv_cache", "KVCacheManager.allocate_slots", a_page_too_few),
        ("scheduler", "Scheduler._add", sampled_before_the_last_chunk),
        ("kv_cache", "PageTable.take_updates", a_stale_page_table),
    ],
)
def test_planted_bugs_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, module: str, method: str, bug: Any
) -> None:
    """The fuzz can fail: it finds each of these bugs within 50 schedules."""
    plant(monkeypatch, f"{module_of(module).__name__}.{method}", bug)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        for seed in range(50):
            fuzz(module_of("scheduler"), seed)


def engine_of(module_of: ModuleOf, num_pages: int = 100, **config: Any) -> FakePagedEngine:
    return FakePagedEngine(module_of("scheduler"), num_pages, **config)


def test_decodes_and_chunks_share_a_step(module_of: ModuleOf) -> None:
    engine = engine_of(module_of, max_num_batched_tokens=8)
    engine.add("a", [1, 2], 20)
    engine.step()
    engine.add("b", list(range(20)), 5)
    shapes = []
    for _ in range(4):
        batch = engine.step()
        names = [r.request_id for r in batch.requests]
        shapes.append(list(zip(names, batch.num_scheduled_tokens, strict=True)))
    assert shapes == [
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 6)],
        [("a", 1), ("b", 1)],
    ]


def test_a_long_prompt_does_not_stop_the_others(module_of: ModuleOf) -> None:
    """Every running request decodes in every step, while the long prompt is chunked."""
    engine = engine_of(module_of, max_num_batched_tokens=16, page_size=4)
    for name in "abc":
        engine.add(name, [1, 2, 3], 30)
    engine.step()
    engine.add("long", [5] * 150, 4)
    while "long" in engine.live:
        batch = engine.step()
        decoding = {name for name in "abc" if name in engine.live}
        assert decoding <= {r.request_id for r in batch.requests}


def test_decode_pages_come_before_chunks(module_of: ModuleOf) -> None:
    """The last free page goes to the request that decodes, not to a chunk of a prompt."""
    engine = engine_of(module_of, num_pages=4, page_size=4, max_num_batched_tokens=64)
    engine.scheduler.admission.new_token_ratio = 0.0
    engine.add("a", [1] * 4, 4)
    engine.add("b", [2] * 8, 1)
    engine.scheduler.max_num_batched_tokens = 8
    engine.step()  # computes all of `a`, and four tokens of `b`
    batch = engine.step()
    assert batch.requests[0].request_id == "a"
    assert engine.scheduler.counters.num_retractions == 0


def test_retraction_takes_the_newest_and_raises_the_ratio(module_of: ModuleOf) -> None:
    engine = engine_of(module_of, num_pages=6, page_size=2, max_num_seqs=3)
    scheduler = engine.scheduler
    scheduler.admission.new_token_ratio = 0.1
    for name in ("old", "new"):
        engine.add(name, [1, 2, 3], 9)
    retracted_at = None
    while scheduler.counters.num_retractions == 0:
        before = scheduler.admission.new_token_ratio
        engine.step()
        retracted_at = [r.request_id for r in scheduler.waiting]
    assert retracted_at == ["new"]
    assert scheduler.admission.new_token_ratio > before
    while engine.live:
        engine.step()
    assert engine.finished["new"] == expected_tokens([1, 2, 3], 9)


def test_the_ratio_decays_and_begins_anew_when_idle(module_of: ModuleOf, code_of: ModuleOf) -> None:
    """The next requests of an idle engine may be of another kind than its last ones."""
    module = code_of("admission")
    engine = engine_of(module_of)
    engine.add("a", [1], 100)
    for _ in range(50):
        engine.step()
    lost = module.INITIAL_NEW_TOKEN_RATIO - engine.scheduler.admission.new_token_ratio
    assert lost == pytest.approx(engine.scheduler.counters.num_steps * module.RATIO_DECAY, rel=0.1)
    while engine.live:
        engine.step()
    assert engine.scheduler.admission.new_token_ratio == module.INITIAL_NEW_TOKEN_RATIO


def test_a_prompt_that_never_fits(module_of: ModuleOf) -> None:
    engine = engine_of(module_of, num_pages=3, page_size=4)
    with pytest.raises(ValueError, match=r"13 tokens.*12 \(num_pages=3 of page_size=4\)"):
        engine.add("huge", [1] * 13, 1)
    engine.add("full", [1] * 12, 5)
    engine.add("next", [2], 3)
    while engine.live:
        engine.step()
    assert len(engine.finished["full"]) == 1, "with a full pool, `full` must end by length"
    assert len(engine.finished["next"]) == 3, "the next request must be served"


def test_two_requests_that_do_not_fit_together_do_not_swap_places(module_of: ModuleOf) -> None:
    """I5: each grows to 60% of the pool. The newer one is retracted once, and then waits."""
    engine = engine_of(module_of, num_pages=10, page_size=4, max_num_seqs=2)
    engine.scheduler.admission.new_token_ratio = 0.0
    for name in ("first", "second"):
        engine.add(name, [ord(name[0])] * 4, 20)
    while engine.live:
        engine.step()
        engine.scheduler.admission.new_token_ratio = 0.0  # the estimate never learns
    assert [*engine.finished] == ["first", "second"]
    assert engine.scheduler.counters.num_retractions == 1
    for name, output in engine.finished.items():
        assert output == expected_tokens([ord(name[0])] * 4, 20)


def test_undo_gives_back_what_was_allocated(module_of: ModuleOf) -> None:
    engine = engine_of(module_of, num_pages=10, page_size=2, max_num_batched_tokens=5)
    engine.add("a", [1, 2, 3, 4], 10)
    engine.step()
    engine.add("b", [1, 2], 2)
    scheduler = engine.scheduler
    batch = scheduler.schedule()
    assert len(batch.requests) == 2
    scheduler.undo(batch)
    scheduler.check_invariants()
    assert [r.request_id for r in scheduler.waiting] == ["b"]
    again = scheduler.schedule()
    assert again.num_scheduled_tokens == batch.num_scheduled_tokens
