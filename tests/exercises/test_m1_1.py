"""m1.1: one after the other. `Scheduler.schedule` and `finish_request`, plain data."""

from __future__ import annotations

import pytest

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
    assert scheduled(scheduler.schedule()) == [("A", 5)], "I5: A came first, and computes 5 tokens"
    assert show(scheduler) == "running: A; waiting: B", "I3: a live request either waits or runs"


@pytest.mark.parametrize(
    ("computed", "expected"), [(7, 1), (0, 8)], ids=["with a cache", "without a cache"]
)
def test_a_step_computes_what_is_not_computed(computed: int, expected: int) -> None:
    """A has 5 prompt tokens and 3 output tokens. Without a cache, a step computes all of them."""
    scheduler = make_scheduler(running=make_request("A", 5, output=3, computed=computed))
    assert scheduled(scheduler.schedule()) == [("A", expected)], f"{computed} of 8 are computed"


def test_a_waiting_request_does_not_join_a_running_one() -> None:
    scheduler = make_scheduler(make_request("B", 1), running=make_request("A", 5))
    for _ in range(3):
        assert scheduled(scheduler.schedule()) == [("A", 5)], "one request at a time: A runs"
    assert show(scheduler) == "running: A; waiting: B", "B waits while A runs"


def test_the_next_one_runs_when_one_has_ended() -> None:
    a, b, c = (make_request(name, 3) for name in "ABC")
    scheduler = make_scheduler(b, c, running=a)
    scheduler.finish_request(a, "length")
    assert show(scheduler) == "running: none; waiting: B C", "I3: A has ended"
    assert scheduled(scheduler.schedule()) == [("B", 3)], "I5: B came before C"


def test_a_request_that_has_ended_says_why() -> None:
    """C is aborted while it waits."""
    a, b, c, d = (make_request(name, 3) for name in "ABCD")
    scheduler = make_scheduler(b, c, d, running=a)
    scheduler.finish_request(c, "abort")
    assert show(scheduler) == "running: A; waiting: B D", "I3: C has left; no other request moves"
    scheduler.finish_request(a, "length")
    assert (a.finish_reason, c.finish_reason) == ("length", "abort"), "`finish_reason` says why"


def test_a_batch_is_a_snapshot() -> None:
    """A request that ends while a step is processed stays in the batch of that step."""
    a = make_request("A", 3)
    scheduler = make_scheduler(a)
    batch = scheduler.schedule()
    scheduler.finish_request(a, "length")
    assert scheduled(batch) == [("A", 3)], "A was removed, and the batch has changed"


def test_an_idle_scheduler_schedules_no_request() -> None:
    assert scheduled(make_scheduler().schedule()) == [], "no request waits or runs"
