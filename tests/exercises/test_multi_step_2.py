"""multi_step.2: requests retreat to the lengths before a plan; an early end keeps its pages."""

from __future__ import annotations

from milestones.electives.multi_step.kv_cache import KVCacheManager
from milestones.electives.multi_step.schedule_batch import ScheduleBatch

from common import Request
from milestones.electives.multi_step.in_flight import StepsInFlight
from tests.exercises.overlap_states import end, running

PAGE_SIZE = 2


def planned(num_steps: int, *names: str) -> tuple[StepsInFlight, list[Request]]:
    """Return requests of 3 tokens, 2 of them computed, and a plan of that many decodes of each."""
    steps = StepsInFlight(KVCacheManager(num_rows=4, num_pages=16, page_size=PAGE_SIZE))
    requests = [running(steps, name, [1, 2, 3], computed=2) for name in names]
    for _ in range(num_steps):
        if steps.batches:
            steps.advance(steps.batches[-1])
        batch = ScheduleBatch()
        for request in requests:
            steps.kv_cache.allocate_slots(request, request.num_computed_tokens + 1)
            batch.add(request, 1)
        steps.batches.append(batch)
    return steps, requests


def test_retreating_restores_the_lengths() -> None:
    """I1: between two steps, a request has its own tokens and no placeholder."""
    steps, (a, b) = planned(4, "a", "b")
    steps.retreat()
    assert (a.token_ids, a.num_computed_tokens) == ([1, 2, 3], 2), f"a has {a.token_ids}"
    assert (b.token_ids, b.num_computed_tokens) == ([1, 2, 3], 2), f"b has {b.token_ids}"
    assert not any(batch.is_advanced for batch in steps.batches), "every batch can advance again"


def test_retreating_leaves_the_plan_and_its_pages() -> None:
    steps, (a,) = planned(4, "a")
    steps.retreat()
    assert len(steps.batches) == 4, "the steps are in flight"
    assert len(steps.kv_cache.pages_of(a)) == 3, "their tokens need three pages of two tokens"


def test_a_finished_request_keeps_its_pages_until_the_plan_ends() -> None:
    """I3: later steps of the plan still write to its pages."""
    steps, (a, b) = planned(4, "a", "b")
    steps.retreat()
    for left in (3, 2, 1):
        batch = steps.batches[0]
        steps.advance(batch)
        steps.complete(batch)
        if left == 3:
            end(steps, a)
        assert a.row is not None, f"I3: {left} steps still write to the pages of a"
        assert len(steps.kv_cache.pages_of(a)) == 3, "I3: no page may leave before that"
        steps.check_invariants([b])
    batch = steps.batches[0]
    steps.advance(batch)
    steps.complete(batch)
    assert a.row is None, "I3: no step in flight writes a, so its row and its pages are free"
    assert a not in steps.planned, "I3: a has left, and `planned` still holds it"
    steps.check_invariants([b])


def test_the_planned_tokens_are_those_when_it_finished() -> None:
    steps, (a,) = planned(4, "a")
    steps.retreat()
    end(steps, a)
    assert steps.planned[a] == 4, "four tokens were planned"
    steps.complete(steps.batches[0])
    assert steps.planned[a] == 4, "its pages still have room for all four"


def test_a_chunk_counts_with_all_its_tokens() -> None:
    """The first step computes the last three tokens of a prompt, the other two decode."""
    steps = StepsInFlight(KVCacheManager(num_rows=4, num_pages=16, page_size=PAGE_SIZE))
    request = running(steps, "a", [1, 2, 3, 4, 5], computed=2)
    for num_tokens in (3, 1, 1):
        if steps.batches:
            steps.advance(steps.batches[-1])
        steps.kv_cache.allocate_slots(request, request.num_computed_tokens + num_tokens)
        batch = ScheduleBatch()
        batch.add(request, num_tokens)
        steps.batches.append(batch)
    steps.retreat()
    end(steps, request)
    assert steps.planned[request] == 5, "three steps compute 3, 1 and 1 tokens: its pages hold them"


def test_a_request_that_no_step_lists_does_not_wait() -> None:
    steps, _requests = planned(4, "a")
    other = running(steps, "b", [1, 2, 3], computed=2)
    end(steps, other)
    assert other.row is None and not steps.finished, (
        "I3: four steps are in flight, and none of them writes b: it is freed at once"
    )


def test_a_request_in_no_step_is_freed_at_once() -> None:
    steps, (a,) = planned(0, "a")
    free = len(steps.kv_cache.allocator.free_pages)
    end(steps, a)
    assert a.row is None and not steps.finished, "I3: no step writes it"
    cached = steps.kv_cache.radix_cache.evictable_size
    assert len(steps.kv_cache.allocator.free_pages) + cached == free + 1, "I3: its page is back"
