"""m1.1: one after the other. `Scheduler.schedule` and `remove_request`, plain data."""

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
    assert got == [("A", 5)], f"I5: A came first and all its 5 tokens are new; scheduled {got}"
    assert show(scheduler) == "running: A; waiting: B", (
        f"I3: a live request waits or runs, not both; {show(scheduler)}"
    )


def test_what_is_computed_is_not_computed_again() -> None:
    """A prompt of 5 tokens and 3 of output, all but the newest in the cache."""
    scheduler = make_scheduler(running=make_request("A", 5, output=3, computed=7))
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1)], f"7 of A's 8 tokens are computed: one is left, scheduled {got}"


def test_without_a_cache_everything_is_computed_again() -> None:
    """Then `num_computed_tokens` stays 0, and a step is the whole sequence."""
    scheduler = make_scheduler(running=make_request("A", 5, output=3, computed=0))
    got = scheduled(scheduler.schedule())
    assert got == [("A", 8)], f"nothing of A is computed, all 8 tokens are; scheduled {got}"


def test_nobody_joins_who_runs() -> None:
    a = make_request("A", 5, output=1, computed=5)
    scheduler = make_scheduler(make_request("B", 1), running=a)
    for _ in range(3):
        got = scheduled(scheduler.schedule())
        assert got == [("A", 1)], f"one request at a time: A runs, B waits; scheduled {got}"
    assert show(scheduler) == "running: A; waiting: B", show(scheduler)


def test_the_next_one_runs_when_one_has_ended() -> None:
    a, b, c = (make_request(name, 3) for name in "ABC")
    scheduler = make_scheduler(b, c, running=a)
    scheduler.remove_request(a)
    assert show(scheduler) == "running: nobody; waiting: B C", f"I3: A ended; {show(scheduler)}"
    got = scheduled(scheduler.schedule())
    assert got == [("B", 3)], f"I5: B came before C; scheduled {got}"


def test_who_waits_may_leave_too() -> None:
    a, b, c, d = (make_request(name, 3) for name in "ABCD")
    scheduler = make_scheduler(b, c, d, running=a)
    scheduler.remove_request(c)
    assert show(scheduler) == "running: A; waiting: B D", (
        f"I3: C was aborted in the queue, nobody else moves; {show(scheduler)}"
    )


def test_a_batch_is_a_snapshot() -> None:
    """Who ends while a step is processed is still in that step's batch."""
    a = make_request("A", 3)
    scheduler = make_scheduler(a)
    batch = scheduler.schedule()
    scheduler.remove_request(a)
    assert scheduled(batch) == [("A", 3)], f"the batch has changed: {scheduled(batch)}"


def test_an_idle_scheduler_schedules_nobody() -> None:
    got = scheduled(make_scheduler().schedule())
    assert got == [], f"nobody waits, nobody runs; scheduled {got}"
