"""The engine on the radix tree: which pages are reused, which requests wait, no lost page."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.config import POLICIES
from common.tracing.forced_retractions import force_retractions
from tests.conftest import EngineFactory, ModuleOf, schedules
from tests.engine.test_paged_scheduler import fuzz
from tests.helpers.fake_paged import FakePagedEngine, expected_tokens
from tests.helpers.oracle import assert_one_answer, drain, greedy
from tests.helpers.replaced import plant

pytestmark = [pytest.mark.since("m4_radix"), pytest.mark.streams(electives=False), pytest.mark.cpu]

STEMS = [[1] * 12, [1] * 7 + [2] * 9, [3, 1, 4, 1, 5, 9, 2, 6], []]


class StormMachine(RuleBasedStateMachine):
    """Requests over a few shared prefixes, on little memory, aborted and retracted at random."""

    scheduler: ModuleType

    @initialize(
        policy=st.sampled_from(POLICIES),
        page_size=st.sampled_from([1, 2, 3, 4]),
        pages=st.integers(0, 12),
        rows=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 5, 16, 64]),
        retract_every=st.sampled_from([None, None, 2, 5]),
    )
    def build(
        self,
        policy: Any,
        page_size: int,
        pages: int,
        rows: int,
        budget: int,
        retract_every: int | None,
    ) -> None:
        self.num_pages = -(-20 // page_size) + pages
        self.engine = FakePagedEngine(
            self.scheduler, self.num_pages, page_size=page_size, max_num_seqs=rows,
            max_num_batched_tokens=budget, schedule_policy=policy, seed=0,
        )  # fmt: skip
        force_retractions(self.engine.scheduler, retract_every)
        self.expected: dict[str, list[int]] = {}
        self.count = 0

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 20),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        max_tokens=st.integers(1, 9),
    )
    def add(self, stem: list[int], cut: int, tail: list[int], max_tokens: int) -> None:
        self.count += 1
        name, prompt = f"{self.count}", stem[:cut] + tail
        self.engine.add(name, prompt, max_tokens)
        capacity = self.num_pages * self.engine.scheduler.kv_cache.page_size + 1 - len(prompt)
        self.expected[name] = expected_tokens(prompt, min(max_tokens, capacity))

    @precondition(lambda self: self.engine.live)
    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.live:
                self.engine.step()

    @precondition(lambda self: self.engine.finished)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def follow_up(self, data: st.DataObject, tail: list[int]) -> None:
        """Add the next turn of a conversation: its prompt contains an earlier answer."""
        answer = self.engine.finished[data.draw(st.sampled_from(sorted(self.engine.finished)))]
        self.add(STEMS[0], 12, [*answer[:4], *tail], 3)

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.live)))
        self.engine.abort(name)
        del self.expected[name]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.live:
                break
            self.engine.step()
        assert self.engine.finished == self.expected, "I1, I2, I5"
        kv_cache = self.engine.scheduler.kv_cache
        assert kv_cache.num_free_pages == self.num_pages, "I3: pages are lost"
        assert kv_cache.radix_cache.protected_size == 0, "I3: a lock is held"


def test_storms_over_shared_prefixes(module_of: ModuleOf) -> None:
    class Machine(StormMachine):
        scheduler = module_of("scheduler")

    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=schedules(250), stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_the_same_prompt_three_times(
    make_engine: EngineFactory, page_size: int, length: int
) -> None:
    """From the second time on, the whole prompt is cached, but its last token is computed again."""
    engine = make_engine(page_size=page_size)
    prompt = list(range(7, 7 + length))
    reusable = (length - 1) // page_size * page_size
    for expected in (0, reusable, reusable):
        output = engine.generate([prompt], greedy(6, ignore_eos=True))[0]
        assert_one_answer("tiny-llama", output, 6)
        assert output.metrics.num_cached_tokens == expected
    stats = engine.stats()
    assert stats.cached_prompt_tokens == 2 * reusable
    assert stats.prefill_tokens == 3 * length - 2 * reusable


@pytest.mark.before("disaggregated")  # prompts are computed where no answer is
def test_the_next_turn_reuses_the_answer(make_engine: EngineFactory) -> None:
    """Generated tokens are cached too, except the last one: no step has computed its KV."""
    engine = make_engine(page_size=1)
    first = engine.generate([[5, 6, 7, 8]], greedy(10, ignore_eos=True))[0]
    turn = [5, 6, 7, 8, *first.outputs[0].token_ids, 9, 9]
    second = engine.generate([turn], greedy(4, ignore_eos=True))[0]
    assert second.metrics.num_cached_tokens == 4 + 9
    assert_one_answer("tiny-llama", second, 4)


def test_a_cold_prefix_is_computed_once(make_engine: EngineFactory) -> None:
    """In-batch sharing: the first request computes the prefix, the others wait for that step."""
    engine = make_engine(page_size=4)
    stem = list(range(40))
    prompts = [[*stem, 100 + i, 7] for i in range(6)]
    outputs = engine.generate(prompts, greedy(5, ignore_eos=True))
    for output in outputs:
        assert_one_answer("tiny-llama", output, 5)
    assert engine.stats().prefill_tokens == 42 + 5 * 2
    assert [o.metrics.num_cached_tokens for o in outputs] == [0, 40, 40, 40, 40, 40]


@pytest.mark.before("disaggregated")  # it also waits for pages
def test_no_request_waits_for_a_prefix_that_it_does_not_share(make_engine: EngineFactory) -> None:
    engine = make_engine(page_size=4)
    for name, prompt in (("a", [1] * 40), ("b", [1] * 40), ("c", [2] * 40)):
        engine.add_request(prompt, greedy(3, ignore_eos=True), name)
    assert {o.request_id for o in engine.step()} == {"a", "c"}
    assert {o.request_id for o in engine.step()} == {"a", "b", "c"}
    drain(engine)


def test_equal_pages_are_adopted(make_engine: EngineFactory) -> None:
    """Of three equal answers, later requests find their tokens in the tree and keep no copy."""
    engine = make_engine(page_size=2, max_num_batched_tokens=12)
    for name in ("a", "b", "c"):
        engine.add_request([9, 8, 7, 6, 5, 4, 3, 2, 1], greedy(4, ignore_eos=True), name)
    for history in drain(engine).values():
        assert_one_answer("tiny-llama", history[-1], 4)
    cached = engine.stats().kv_pages_cached
    assert cached == (9 + 3) // 2, "there must be one copy of the prompt and its answer"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_a_tenth_of_the_working_set(make_engine: EngineFactory, policy: str) -> None:
    engine = make_engine(page_size=4, num_pages=30, max_num_seqs=6, schedule_policy=policy, seed=1)
    stems = [[i] * 30 for i in range(12)]
    prompts = [[*stems[i % 12], 50 + i % 3, 2] for i in range(36)]
    outputs = engine.generate(prompts, greedy(4, ignore_eos=True))
    for output in outputs:
        assert_one_answer("tiny-llama", output, 4)


def test_a_refused_admission_leaves_no_trace(module_of: ModuleOf) -> None:
    """For a request that does not fit, no node is locked, split or evicted."""
    engine = FakePagedEngine(module_of("scheduler"), 16, page_size=1, max_num_seqs=4)
    engine.add("warm", [1, 2, 3, 4], 1)
    engine.step()
    engine.add("big", [7] * 6, 6)
    engine.step()
    kv_cache = engine.scheduler.kv_cache

    def warm_branch() -> list[tuple[list[int], int, int, int]]:
        nodes = kv_cache.radix_cache.nodes()
        found = [(list(n.tokens), n.lock_count, n.hits, n.last_used) for n in nodes]
        return [facts for facts in found if facts[0][0] != 7]

    before = warm_branch()
    engine.add("late", [1, 2, 9, 9, 9, 9], 6)
    engine.step()
    assert engine.live["late"].row is None, "the request was admitted"
    assert warm_branch() == before == [([1, 2, 3, 4], 0, 0, before[0][3])]
    while engine.live:
        engine.step()
    assert engine.finished["late"] == expected_tokens([1, 2, 9, 9, 9, 9], 6)


def the_last_token_is_matched_too(_: Any, self: Any, request: Any) -> list[int]:
    whole = request.num_tokens // self.page_size * self.page_size
    return list(request.token_ids[:whole])


def inserted_before_it_is_written(insert: Any, self: Any, request: Any) -> None:
    computed = request.num_computed_tokens
    pages = len(self.pages_of(request)) * self.page_size
    request.num_computed_tokens = min(request.num_tokens, pages)
    insert(self, request)
    request.num_computed_tokens = computed


def the_table_is_not_told(replace: Any, self: Any, row: int, pages: Any) -> Any:
    seen = len(self.updates)
    replaced = replace(self, row, pages)
    del self.updates[seen:]
    return replaced


def a_split_loses_its_locks(split: Any, self: Any, node: Any, length: int) -> Any:
    upper = split(self, node, length)
    upper.lock_count = 0
    return upper


def only_the_parents_are_locked(lock: Any, self: Any, node: Any) -> None:
    lock(self, node.parent or node)


@pytest.mark.parametrize(
    ("module", "method", "bug"),
    [
        ("kv_cache", "KVCacheManager._cacheable_tokens", the_last_token_is_matched_too),
        ("kv_cache", "KVCacheManager.insert", inserted_before_it_is_written),
        ("kv_cache", "PageTable.replace", the_table_is_not_told),
        ("radix_cache", "RadixCache._split", a_split_loses_its_locks),
        ("radix_cache", "RadixCache.lock", only_the_parents_are_locked),
    ],
)
def test_planted_bugs_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, module: str, method: str, bug: Any
) -> None:
    """The fuzz can fail: it finds each of these bugs within 300 schedules."""
    plant(monkeypatch, f"{module_of(module).__name__}.{method}", bug)
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        for seed in range(300):
            fuzz(module_of("scheduler"), seed)


def admissions(engine: FakePagedEngine) -> list[str]:
    """Return the order in which an engine with one row serves its requests."""
    while engine.live:
        engine.step()
    return list(engine.finished)


def policy_engine(module_of: ModuleOf, policy: Any) -> FakePagedEngine:
    engine = FakePagedEngine(
        module_of("scheduler"), 60, page_size=1, max_num_seqs=1, schedule_policy=policy, seed=3
    )
    engine.add("warm", [1, 2, 3, 4, 5], 1)
    engine.step()
    for name, prompt, max_tokens in (
        ("cold", [9, 9], 5),
        ("short", [1, 2, 8], 2),
        ("long", [1, 2, 3, 4, 7], 2),
        ("cold too", [9, 9, 9], 9),
        ("cold three", [9, 9, 1], 3),
    ):
        engine.add(name, prompt, max_tokens)
    return engine


def test_the_policies(module_of: ModuleOf) -> None:
    def order(policy: str) -> list[str]:
        return admissions(policy_engine(module_of, policy))[1:]

    arrival = ["cold", "short", "long", "cold too", "cold three"]
    assert order("fcfs") == arrival
    assert order("lpm")[:2] == ["long", "short"]
    assert order("lof") == ["cold too", "cold", "cold three", "short", "long"]
    assert order("dfs-weight") == ["short", "long", "cold", "cold too", "cold three"], (
        "branches come before the requests that end at their node, the root"
    )
    assert sorted(order("random")) == sorted(arrival) and order("random") == order("random")


def test_a_branch_is_served_before_the_next(module_of: ModuleOf) -> None:
    """dfs-weight serves the branch with the most waiting requests first, and serves all of it."""
    engine = FakePagedEngine(
        module_of("scheduler"), 60, page_size=1, max_num_seqs=1, schedule_policy="dfs-weight"
    )
    engine.add("x", [1, 1, 1], 1)
    engine.add("y", [2, 2, 2], 1)
    engine.step()
    engine.step()
    for i, stem in enumerate([1, 2, 1, 2, 2]):
        engine.add(f"{stem}{'abcde'[i]}", [stem, stem, stem, 5 + i], 2)
    waiting = engine.scheduler.waiting
    ordered = [request.request_id for request in engine.scheduler.policy.order(waiting)]
    assert ordered == ["2b", "2d", "2e", "1a", "1c"]
    assert len(admissions(engine)) == 7


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_starves_anyone(module_of: ModuleOf, policy: Any) -> None:
    """A cold request is overtaken by no more requests than the bound allows."""
    bound = module_of("policy").MAX_OVERTAKING
    engine = FakePagedEngine(
        module_of("scheduler"), 60, page_size=1, max_num_seqs=1, schedule_policy=policy, seed=0
    )
    engine.add("warm", [1, 2, 3, 4], 1)
    engine.step()
    ahead = 5
    for i in range(ahead):
        engine.add(f"ahead {i}", [1, 2, 3, 4, i], 4)
    engine.add("cold", [9], 1)
    for i in range(3 * bound):
        if "cold" in engine.live:
            engine.add(f"later {i}", [1, 2, 3, 4, i], 4)
            for _ in range(4):
                engine.step()
    assert "cold" in engine.finished
    assert len(engine.finished) <= 1 + ahead + bound + 1
    while engine.live:
        engine.step()
