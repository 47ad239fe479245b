"""m1.1: one after the other. `Scheduler.schedule` and `finish_request`, plain data."""

from __future__ import annotations

from common import Request
from m1_single.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names, scheduled


def make_scheduler(*waiting: Request, running: Request | None = None) -> Scheduler:
    scheduler = Scheduler()
    if running is not None:
        scheduler.running.append(running)
    for request in waiting:
        scheduler.add_request(request)
    return scheduler


def show(scheduler: Scheduler) -> str:
    return f"running: {names(scheduler.running)}; waiting: {names(scheduler.waiting)}"


def test_the_oldest_that_waits_runs() -> None:
    scheduler = make_scheduler(make_request("A", 5), make_request("B", 2))
    got = scheduled(scheduler.schedule())
    assert got == [("A", 5)], (
        f"I5: A came first, and none of its 5 tokens is computed; scheduled {got}"
    )
    assert show(scheduler) == "running: A; waiting: B", (
        f"I3: a live request either waits or runs; {show(scheduler)}"
    )


def test_what_is_computed_is_not_computed_again() -> None:
    """A has 5 prompt tokens and 3 output tokens; all but the newest are in the cache."""
    scheduler = make_scheduler(running=make_request("A", 5, output=3, computed=7))
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1)], f"7 of A's 8 tokens are computed, 1 is left; scheduled {got}"


def test_without_a_cache_everything_is_computed_again() -> None:
    """Without a cache `num_computed_tokens` stays 0, and a step computes the whole sequence."""
    scheduler = make_scheduler(running=make_request("A", 5, output=3, computed=0))
    got = scheduled(scheduler.schedule())
    assert got == [("A", 8)], (
        f"none of A's tokens is computed: all 8 are scheduled; scheduled {got}"
    )


def test_a_waiting_request_does_not_join_a_running_one() -> None:
    a = make_request("A", 5, output=1, computed=5)
    scheduler = make_scheduler(make_request("B", 1), running=a)
    for _ in range(3):
        got = scheduled(scheduler.schedule())
        assert got == [("A", 1)], f"one request at a time: A runs, B waits; scheduled {got}"
    assert show(scheduler) == "running: A; waiting: B", show(scheduler)


def test_the_next_one_runs_when_one_has_ended() -> None:
    a, b, c = (make_request(name, 3) for name in "ABC")
    scheduler = make_scheduler(b, c, running=a)
    scheduler.finish_request(a, "length")
    assert show(scheduler) == "running: none; waiting: B C", f"I3: A has ended; {show(scheduler)}"
    got = scheduled(scheduler.schedule())
    assert got == [("B", 3)], f"I5: B came before C; scheduled {got}"


def test_a_waiting_request_may_leave_too() -> None:
    a, b, c, d = (make_request(name, 3) for name in "ABCD")
    scheduler = make_scheduler(b, c, d, running=a)
    scheduler.finish_request(c, "abort")
    assert show(scheduler) == "running: A; waiting: B D", (
        f"I3: C was aborted while it waited; no other request moves; {show(scheduler)}"
    )


def test_a_request_that_has_ended_says_why() -> None:
    a, b = make_request("A", 3), make_request("B", 3)
    scheduler = make_scheduler(b, running=a)
    scheduler.finish_request(a, "length")
    scheduler.finish_request(b, "abort")
    got = a.finish_reason, b.finish_reason
    assert got == ("length", "abort"), (
        f"A ended by length, and B was aborted: `finish_reason` must say so, not {got}"
    )


def test_a_batch_is_a_snapshot() -> None:
    """A request that ends while a step is processed stays in the batch of that step."""
    a = make_request("A", 3)
    scheduler = make_scheduler(a)
    batch = scheduler.schedule()
    scheduler.finish_request(a, "length")
    assert scheduled(batch) == [("A", 3)], (
        f"A was removed, and the batch has changed to {scheduled(batch)}"
    )


def test_an_idle_scheduler_schedules_no_request() -> None:
    got = scheduled(make_scheduler().schedule())
    assert got == [], f"no request waits or runs; scheduled {got}"
