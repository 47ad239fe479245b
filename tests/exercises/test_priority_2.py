"""priority.2: a more urgent request preempts the fewest others, and never an equal one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common import EngineConfig, Request
from milestones.electives.priority.schedule_batch import ScheduleBatch
from milestones.electives.priority.scheduler import Scheduler
from tests.exercises.by_hand import make_request

PAGE_SIZE = 2


def make_scheduler(num_pages: int = 32, **config: Any) -> Scheduler:
    """Return a scheduler without requests, with pages of two tokens."""
    made = {
        "device": "cpu",
        "max_model_len": 200,
        "max_num_seqs": 4,
        "page_size": PAGE_SIZE,
        **config,
    }
    scheduler = Scheduler(EngineConfig(**made), num_pages)
    scheduler.admission.new_token_ratio = 0.1  # of 8 output tokens, none is expected
    return scheduler


def add(scheduler: Scheduler, name: str, tokens: Sequence[int], priority: int) -> Request:
    """Add a request with at most 8 output tokens."""
    request = make_request(name, tokens, max_tokens=8)
    request.priority = priority
    scheduler.add_request(request)
    return request


def run(scheduler: Scheduler, **priorities: int) -> None:
    """Add requests of three tokens with these priorities, and compute their prompts."""
    for name, priority in priorities.items():
        add(scheduler, name, [ord(name), 2, 3], priority)
    step(scheduler)


def step(scheduler: Scheduler) -> list[str]:
    """Run a step without overlap. Return the names of its requests."""
    batch = scheduler.schedule()
    complete(scheduler, batch)
    return [request.request_id for request in batch.requests]


def complete(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    if batch.requests:
        scheduler.in_flight.advance(batch)
        scheduler.update_from_output(batch, [(7, None)] * len(batch.sampled_requests))
    scheduler.check_invariants()


def names(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


def state(scheduler: Scheduler) -> tuple[list[str], list[str]]:
    """Return the names of the running and of the waiting requests."""
    return names(scheduler.running), names(scheduler.waiting)


def test_the_least_urgent_request_makes_way_for_a_row() -> None:
    """Of equal ones, it is the newest."""
    scheduler = make_scheduler(max_num_seqs=3)
    run(scheduler, a=0, b=5, c=5)
    add(scheduler, "urgent", [9, 8, 7], -1)
    found = step(scheduler)
    assert sorted(found) == ["a", "b", "urgent"], f"c makes way: {found}"
    assert state(scheduler) == (["urgent", "a", "b"], ["c"]), "running requests: most urgent first"


@pytest.mark.parametrize("priority", [5, 6])
def test_equal_and_less_urgent_requests_wait(priority: int) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    run(scheduler, a=5, b=5)
    add(scheduler, "late", [9, 8, 7], priority)
    found = [step(scheduler) for _ in range(3)]
    assert found == [["a", "b"]] * 3, f"nothing is preempted for priority {priority}: {found}"
    assert scheduler.preemption.num_preemptions == 0


def test_one_request_makes_way_for_two_pages() -> None:
    """Five requests have four pages each, and no page is free."""
    scheduler = make_scheduler(num_pages=20, max_num_seqs=8)
    for name in "abcde":
        add(scheduler, name, [ord(name)] * 7, 5)
    step(scheduler)
    assert scheduler.kv_cache.num_free_pages == 0
    add(scheduler, "urgent", [9, 8, 7], 0)
    step(scheduler)
    assert scheduler.preemption.num_preemptions == 1, "one request has four pages: that is enough"
    assert state(scheduler) == (["urgent", "a", "b", "c", "d"], ["e"])


def test_pages_that_others_share_do_not_become_free() -> None:
    """c and d read five pages of the prefix of b, and have one page of their own each."""
    scheduler = make_scheduler(num_pages=14, max_num_seqs=8)
    shared = [2] * 10
    add(scheduler, "a", [1] * 10, 5)
    add(scheduler, "b", shared, 5)
    step(scheduler)
    for name in "cd":
        add(scheduler, name, [*shared, ord(name)], 5)
    step(scheduler)
    assert scheduler.kv_cache.num_free_pages == 0
    urgent = add(scheduler, "urgent", [9, 8, 7], 0)
    victims = names(scheduler.preemption.victims(urgent, scheduler.running, {}))
    assert victims == ["d", "c"], "for two pages, both must go"
    step(scheduler)
    assert scheduler.preemption.num_preemptions == 2, "both are counted"


def test_a_request_that_frees_too_little_is_spared() -> None:
    """The newest has one page, and the urgent request needs four: b alone is enough."""
    scheduler = make_scheduler(num_pages=11, max_num_seqs=8)
    for name, size in (("a", 9), ("b", 9), ("c", 1)):
        add(scheduler, name, [ord(name)] * size, 5)
    step(scheduler)
    urgent = add(scheduler, "urgent", [9] * 7, 0)
    victims = names(scheduler.preemption.victims(urgent, scheduler.running, {}))
    assert victims == ["b"], "c is not needed"


@pytest.mark.parametrize(
    ("small", "needed", "expected"), [(1, 4, ["b"]), (2, 6, ["d", "b"])], ids=["two", "one"]
)
def test_all_that_are_not_needed_are_spared(small: int, needed: int, expected: list[str]) -> None:
    """a and b have four pages each. c and d are small, and newer: they are chosen before b."""
    scheduler = make_scheduler(num_pages=8 + 2 * small, max_num_seqs=8)
    for name, pages in (("a", 4), ("b", 4), ("c", small), ("d", small)):
        add(scheduler, name, [ord(name)] * (pages * PAGE_SIZE - 1), 5)
    step(scheduler)
    urgent = add(scheduler, "urgent", [9] * (needed * PAGE_SIZE - 1), 0)
    victims = names(scheduler.preemption.victims(urgent, scheduler.running, {}))
    assert victims == expected, (
        f"d, c and b were chosen, with {small}, {small} and 4 pages, for {needed} pages: of those "
        "that are not needed, c is spared first, because it is more urgent than d"
    )


def test_nothing_is_preempted_in_vain() -> None:
    """a is more urgent than the new request, and b alone has too few pages."""
    scheduler = make_scheduler(num_pages=8, max_num_seqs=8)
    add(scheduler, "a", [1] * 11, -5)
    add(scheduler, "b", [2] * 3, 5)
    step(scheduler)
    urgent = add(scheduler, "urgent", [9] * 9, 0)
    assert scheduler.preemption.victims(urgent, scheduler.running, {}) == [], (
        "even without b, four pages are missing"
    )
    assert step(scheduler) == ["a", "b"], "both go on"


def test_a_prompt_that_takes_all_tokens_of_the_step_makes_way() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "long", [1] * 20, 5)
    step(scheduler)
    add(scheduler, "urgent", [9, 8, 7], 0)
    assert step(scheduler) == ["urgent"], "the chunk of `long` leaves the step"
    assert step(scheduler) == ["urgent", "long"], "then `long` goes on with what is left"
    long = scheduler.running[1]
    assert long.num_computed_tokens == 7, "I3: its first chunk was still cached"


def test_a_victim_leaves_the_step() -> None:
    """Its token was in the batch already: the batch, and its samples, are those of the others."""
    scheduler = make_scheduler(max_num_seqs=2)
    run(scheduler, a=0, b=5)
    add(scheduler, "urgent", [9, 8, 7], -1)
    batch = scheduler.schedule()
    assert names(batch.requests) == ["a", "urgent"], "b made way, so the step does not compute it"
    assert (batch.num_scheduled_tokens, batch.sampled_indices) == ([1, 3], [0, 1])
    complete(scheduler, batch)


def test_a_request_in_flight_is_not_preempted() -> None:
    """I1: its step ends first, so that its token is not lost. Then it makes way."""
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", [1, 2, 3], 5)
    batch = scheduler.schedule()
    urgent = add(scheduler, "urgent", [9, 8, 7], 0)
    scheduler.in_flight.advance(batch)
    planned, running = ScheduleBatch(), scheduler.running
    make_way = scheduler.preemption.make_way
    assert make_way(urgent, running, planned, may_preempt=False) is None, "a is being computed"
    assert scheduler.preemption.num_preemptions == 0, "nothing was preempted"
    assert scheduler.needs_result(), "the next step waits for the result of this one"
    assert names(scheduler.running) == ["a"]
    found = make_way(urgent, running, planned, may_preempt=True)
    assert found == running and scheduler.preemption.num_preemptions == 1


def test_a_request_with_room_joins_without_victims() -> None:
    """An empty list, and not None: None means that it must wait."""
    scheduler = make_scheduler(max_num_seqs=2)
    run(scheduler, a=5)
    urgent = add(scheduler, "urgent", [9, 8, 7], 0)
    found = scheduler.preemption.make_way(
        urgent, scheduler.running, ScheduleBatch(), may_preempt=True
    )
    assert found == [], "a row is free"


def test_an_aged_request_is_not_preempted() -> None:
    """I5: so many others overtook it that its priority does not count any more."""
    scheduler = make_scheduler(max_num_seqs=1)
    old = add(scheduler, "old", [1, 2, 3], 5)
    scheduler.policy._aged[old] = 0
    step(scheduler)
    add(scheduler, "urgent", [9, 8, 7], 0)
    assert step(scheduler) == ["old"], "the urgent request waits"
