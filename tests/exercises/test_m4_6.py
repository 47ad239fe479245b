"""m4.6: the order of admission, waiting for a prefix, and no starvation; then the whole engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common import EngineConfig, Request, SamplingParams
from common.config import POLICIES
from m4_radix import scheduler as scheduler_module
from m4_radix.policy import MAX_OVERTAKING, WINDOW
from m4_radix.scheduler import Scheduler
from tests.conftest import build_engine
from tests.exercises.by_hand import make_request, request_with
from tests.exercises.radix_states import cache_by_hand, give_row
from tests.helpers.fake_paged import FakePagedEngine, expected_tokens
from tests.helpers.oracle import assert_one_answer, greedy


def scheduler_of(policy: Any = "fcfs", page_size: int = 1) -> Scheduler:
    """Return a scheduler with 60 pages and no requests."""
    config = EngineConfig(
        page_size=page_size, max_num_seqs=4, max_model_len=200, schedule_policy=policy, seed=3
    )
    return Scheduler(config, num_pages=60)


def queue(
    scheduler: Scheduler, prompts: dict[str, list[int]], max_tokens: int = 50
) -> list[Request]:
    """Let requests wait: a name and a prompt each. Return them."""
    requests = [make_request(*pair, max_tokens=max_tokens) for pair in prompts.items()]
    for request in requests:
        scheduler.add_request(request)
    return requests


def ordered(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler.policy.order(scheduler.waiting)]


def overtake(scheduler: Scheduler, times: int) -> None:
    """Admit `times` other requests before the waiting ones: the policy counts admissions."""
    for _ in range(times):
        passing = make_request("passing", [8])
        scheduler.policy.on_arrival(passing, 0)
        scheduler.policy.on_admission(passing)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_to_order_is_not_to_admit(policy: str) -> None:
    scheduler = scheduler_of(policy)
    queue(scheduler, {"a": [1, 2], "b": [1, 2], "c": [1, 2]})
    assert ordered(scheduler) == ordered(scheduler) == ["a", "b", "c"], "first come, first served"
    assert len(scheduler.waiting) == 3, "order must not change the queue"


def test_the_longest_cached_prefix_goes_first() -> None:
    scheduler = scheduler_of("lpm")
    prompts = {
        "cold": [9], "two pages": [1, 2, 9, 9], "cold too": [8], "three pages": [1, 2, 3, 9],
    }  # fmt: skip
    queue(scheduler, prompts)
    assert ordered(scheduler) == [*prompts], "nothing is cached: then age decides"
    cache_by_hand(scheduler.kv_cache, [1, 2, 3])
    assert ordered(scheduler) == ["three pages", "two pages", "cold", "cold too"]


@pytest.mark.parametrize("policy", ["lpm", "lof", "random"])
def test_a_request_that_is_due_goes_first(policy: str) -> None:
    """I5: after a fixed number of admissions, a request that a policy puts last goes first."""
    scheduler = scheduler_of(policy)
    cache_by_hand(scheduler.kv_cache, [1, 2, 3])
    queue(scheduler, {"cold": [9], "warm": [1, 2, 3, 8]}, max_tokens=1)
    assert len(ordered(scheduler)) == 2, "two requests wait"
    overtake(scheduler, MAX_OVERTAKING + 1)
    better = {f"better {i}": [1, 2, 3, i] for i in range(4)}
    queue(scheduler, better, max_tokens=9)
    order = ordered(scheduler)
    assert order[:2] == ["cold", "warm"], (
        f"I5: {MAX_OVERTAKING + 1} others were admitted since these two arrived: they are due, and "
        "requests that are due go in order of age, whatever the policy"
    )
    assert sorted(order[2:]) == [*better], "the others follow, each of them once"


def test_a_request_that_is_not_due_yet_waits_its_turn() -> None:
    scheduler = scheduler_of("lpm")
    cache_by_hand(scheduler.kv_cache, [1, 2, 3])
    queue(scheduler, {"cold": [9]})
    overtake(scheduler, MAX_OVERTAKING - 1)
    queue(scheduler, {"better": [1, 2, 3, 4]})
    assert ordered(scheduler) == ["better", "cold"], "no request is due yet: the policy decides"


def test_a_retracted_request_is_due_at_once() -> None:
    scheduler = scheduler_of("lpm")
    cache_by_hand(scheduler.kv_cache, [1, 2, 3])
    retracted, _ = queue(scheduler, {"retracted": [9, 9], "better": [1, 2, 3, 4]})
    scheduler.policy.on_retraction(retracted)
    assert ordered(scheduler) == ["retracted", "better"], "it has run already: it is the oldest"


def test_only_the_oldest_are_compared() -> None:
    """The cost of a step is bounded, however long the queue is."""
    scheduler = scheduler_of("lpm")
    cache_by_hand(scheduler.kv_cache, [1, 2, 3])
    oldest = {f"{i}": [9] for i in range(WINDOW)}
    queue(scheduler, {**oldest, "beyond": [1, 2, 3, 4]})
    assert ordered(scheduler) == [*oldest], f"the {WINDOW} oldest are ordered, and no more"


def branches(scheduler: Scheduler, sizes: Sequence[int]) -> None:
    """Cache branches 1, 2, … of three pages each, and queue `sizes[i]` requests for each branch.

    The requests arrive in turns: one for each branch, then the next one for each branch.
    """
    for stem in range(1, len(sizes) + 1):
        cache_by_hand(scheduler.kv_cache, [stem] * 3)
    for turn in range(max(sizes)):
        for stem, size in enumerate(sizes, start=1):
            if turn < size:
                queue(scheduler, {f"{stem}{'abcdef'[turn]}": [stem] * 3 + [50 + turn]})


def test_a_branch_is_served_before_the_next() -> None:
    """dfs-weight admits all requests of a branch while it is cached, the heaviest branch first."""
    scheduler = scheduler_of("dfs-weight")
    branches(scheduler, [2, 3, 1])
    assert ordered(scheduler) == ["2a", "2b", "2c", "1a", "1b", "3a"], (
        "three requests wait for branch 2, two for branch 1 and one for branch 3"
    )


def test_a_branch_weighs_what_waits_below_it() -> None:
    """The weight of a node is the number of requests that wait for it or for a node below it."""
    scheduler = scheduler_of("dfs-weight")
    stem = cache_by_hand(scheduler.kv_cache, [1])
    cache_by_hand(scheduler.kv_cache, [2], stem)
    cache_by_hand(scheduler.kv_cache, [3], stem)
    cache_by_hand(scheduler.kv_cache, [7])
    queue(scheduler, {"other a": [7, 50], "other b": [7, 51], "light": [1, 3, 50]})
    queue(scheduler, {"heavy a": [1, 2, 50], "heavy b": [1, 2, 51]})
    assert ordered(scheduler) == ["heavy a", "heavy b", "light", "other a", "other b"], (
        "three requests wait below 1 and two for 7: 1 goes first, its heavier branch first"
    )


def test_branches_come_before_what_ends_at_their_node() -> None:
    """What ends above a branch uses nothing of it, and would evict it before it is used."""
    scheduler = scheduler_of("dfs-weight")
    queue(scheduler, {"cold": [9, 9]})
    stem = cache_by_hand(scheduler.kv_cache, [1])
    queue(scheduler, {"stem only": [1, 50]})
    for branch in (2, 3):
        cache_by_hand(scheduler.kv_cache, [branch], stem)
    queue(scheduler, {"2a": [1, 2, 50], "3a": [1, 3, 50], "3b": [1, 3, 51]})
    assert ordered(scheduler) == ["3a", "3b", "2a", "stem only", "cold"], (
        "the branches below 1 first, then what ends at 1, and last what shares nothing"
    )


def test_no_request_is_lost_in_the_branches() -> None:
    scheduler = scheduler_of("dfs-weight")
    branches(scheduler, [2, 2])
    queue(scheduler, {"cold": [9, 9], "stem only": [1, 50]})
    expected = ["1a", "1b", "2a", "2b", "cold", "stem only"]
    assert sorted(ordered(scheduler)) == expected, "each waiting request is in the order once"


def beside(
    scheduler: Scheduler, waiting: list[int], running: list[int], cached: Sequence[int] = ()
) -> Request:
    """Return a request that waits beside a running one, which has a cached prefix or none."""
    runs = make_request("runs", running)
    [waits] = queue(scheduler, {"waits": waiting})
    assert not scheduler.admission.waits_for_prefix(waits, scheduler.running), "no request runs"
    stem = cache_by_hand(scheduler.kv_cache, cached) if cached else None
    give_row(scheduler.kv_cache, runs, len(cached), stem)
    scheduler.running.append(runs)
    return waits


def test_a_request_that_is_due_waits_for_no_other() -> None:
    """I5: there may always be another prefix to wait for; the bound holds in that case too."""
    scheduler = scheduler_of(page_size=2)
    waits = beside(scheduler, [1, 2, 3, 4, 9], [1, 2, 3, 4, 5])
    assert scheduler.admission.waits_for_prefix(waits, scheduler.running), (
        "a running request computes the first pages, 1 2 and 3 4, and has not inserted them yet: "
        "one step later they can be shared"
    )
    overtake(scheduler, MAX_OVERTAKING + 1)
    assert not scheduler.admission.waits_for_prefix(waits, scheduler.running), (
        "I5: it is due and must not wait"
    )


def test_a_request_waits_for_the_pages_after_its_prefix() -> None:
    """Its prefix is cached, and a running request computes the pages that follow."""
    scheduler = scheduler_of(page_size=2)
    stem = [1, 2, 3, 4]
    waits = beside(scheduler, [*stem, 5, 6, 7, 8, 9], [*stem, 5, 6, 7, 8, 10], stem)
    unrelated = make_request("unrelated", [7] * 9)
    give_row(scheduler.kv_cache, unrelated, 0)
    scheduler.running.insert(0, unrelated)
    assert scheduler.admission.waits_for_prefix(waits, scheduler.running), (
        "1 2 3 4 are cached; the second of the two running requests computes 5 6 and 7 8, which "
        "follow: one step later they can be shared"
    )


def test_no_request_waits_for_an_answer() -> None:
    """An answer enters the tree when its request ends, which may take many steps."""
    scheduler = scheduler_of(page_size=2)
    waits = beside(scheduler, [1, 2, 3, 4, 9], [1, 2])
    scheduler.running[0].token_ids += [3, 4, 5]
    assert not scheduler.admission.waits_for_prefix(waits, scheduler.running), (
        "3 4 is in the output of the running request, and not in its prompt"
    )


def test_no_request_waits_for_pages_after_another_prefix() -> None:
    """The keys and values of a page depend on all tokens before it."""
    scheduler = scheduler_of(page_size=2)
    waits = beside(scheduler, [1, 2, 3, 4, 5, 6, 7], [8, 8, 3, 4, 5, 6, 9])
    cache_by_hand(scheduler.kv_cache, [1, 2])
    assert not scheduler.admission.waits_for_prefix(waits, scheduler.running), (
        "I1: the running request computes 3 4 and 5 6 after 8 8, the waiting one needs them after "
        "1 2: these are other keys and values"
    )


def test_a_request_that_reads_its_prompt_waits_for_no_other() -> None:
    """A request with prompt_logprobs computes its whole prompt: it can share nothing later."""
    scheduler = scheduler_of(page_size=2)
    beside(scheduler, [9], [1, 2, 3, 4, 5])
    reads = request_with(SamplingParams(prompt_logprobs=1), [1, 2, 3, 4, 9])
    scheduler.add_request(reads)
    assert not scheduler.admission.waits_for_prefix(reads, scheduler.running), (
        "the request needs_prompt_logprobs: the pages 1 2 and 3 4 would be of no use to it"
    )


@pytest.mark.parametrize(
    ("why", "running", "waiting", "cached"),
    [
        ("the running prompt begins with other tokens", [5, 6, 7, 8], [1, 2, 3, 4, 9], []),
        ("only one page is the same: too few to wait for", [1, 2, 8, 9], [1, 2, 3, 4, 9], []),
        (
            "the pages hold its last token, which it must compute itself",
            [1, 2, 3, 4, 5],
            [1, 2, 3, 4],
            [],
        ),
        ("the running prompt ends before the pages do", [1, 2, 3], [1, 2, 3, 4, 9], []),
        (
            "page 1 2 can be shared at once; 9 9 is not computed",
            [1, 2, 3, 4, 5],
            [1, 2, 9, 9, 9, 9, 9],
            [1, 2],
        ),
    ],
)
def test_no_request_waits_in_vain(
    why: str, running: list[int], waiting: list[int], cached: list[int]
) -> None:
    scheduler = scheduler_of(page_size=2)
    waits = beside(scheduler, waiting, running, cached)
    assert not scheduler.admission.waits_for_prefix(waits, scheduler.running), why


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_starves_a_cold_request(policy: Any) -> None:
    """Requests with a cached prefix keep arriving: a cold one runs within the bound, on one row."""
    engine = FakePagedEngine(
        scheduler_module, 60, page_size=1, max_num_seqs=1, schedule_policy=policy, seed=0
    )
    engine.add("warm", [1, 2, 3, 4], 1)
    engine.step()
    engine.add("cold", [9], 1)
    for i in range(2 * MAX_OVERTAKING):
        if "cold" not in engine.live:
            break
        engine.add(f"later {i}", [1, 2, 3, 4, i], 2)
        engine.step()
        engine.step()
    assert "cold" in engine.finished, f"I5: {len(engine.finished)} requests finished before it"
    assert len(engine.finished) <= 1 + MAX_OVERTAKING + 1
    assert engine.finished["cold"] == expected_tokens([9], 1), "I1"


def test_a_cold_prefix_is_computed_once() -> None:
    """Six prompts share a stem of ten pages: one computes the stem, the other five reuse it."""
    engine = build_engine("m4_radix", page_size=4)
    stem = list(range(40))
    outputs = engine.generate([[*stem, 100 + i, 7] for i in range(6)], greedy(5, ignore_eos=True))
    for output in outputs:
        assert_one_answer("tiny-llama", output, 5)
    assert engine.stats().prefill_tokens == 42 + 5 * 2, (
        "the stem of 40 tokens is computed once, and two more tokens of each of the six prompts"
    )
    assert [o.metrics.num_cached_tokens for o in outputs] == [0, 40, 40, 40, 40, 40]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_the_same_prompt_three_times(length: int) -> None:
    """I1: the prompt is cached, its last token is computed, and the answer is Hugging Face's."""
    engine = build_engine("m4_radix", page_size=4)
    prompt = list(range(7, 7 + length))
    reusable = (length - 1) // 4 * 4
    for expected in (0, reusable, reusable):
        output = engine.generate([prompt], greedy(6, ignore_eos=True))[0]
        assert_one_answer("tiny-llama", output, 6)
        assert output.metrics.num_cached_tokens == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_little_memory_changes_no_answer(policy: Any) -> None:
    """I2: with hits, evictions and retractions, under any policy, tokens are Hugging Face's."""
    engine = build_engine(
        "m4_radix", page_size=4, num_pages=14, max_num_seqs=3, schedule_policy=policy, seed=1
    )
    prompts = [[*([i // 2 % 3] * 18), 50 + i % 2, 2] for i in range(10)]
    for output in engine.generate(prompts, greedy(4, ignore_eos=True)):
        assert_one_answer("tiny-llama", output, 4)
    assert engine.stats().cached_prompt_tokens > 0
