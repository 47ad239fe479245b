"""m5.1: the forward thread runs its work in order, and its events say how far it has come."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest

from m5_overlap.stream import ThreadEvent, ThreadStream, Worker
from tests.exercises.by_hand import watch

PATIENCE = 8  # seconds until a thread that should have ended counts as stuck


def worker_of(*works: Callable[[], Any], least_seconds: float = 0.0) -> tuple[Worker, Any]:
    """Return a worker with this work and then None in its queue, and the events of the work."""
    queue: Any = SimpleQueue()
    events = [ThreadEvent() for _ in works]
    for item in zip(works, events, strict=True):
        queue.put(item)
    queue.put(None)
    return Worker(queue, deque(), least_seconds), events


def run(worker: Worker) -> None:
    """Let the worker empty its queue on a thread. Raise the exception that `run` raised."""
    raised: list[BaseException] = []

    def target() -> None:
        try:
            worker.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if raised:
        raise raised[0]
    assert not thread.is_alive(), "I5: None in the queue ends the worker; it still waits or runs"


def test_work_runs_in_the_order_it_was_launched() -> None:
    seen: list[int] = []
    worker, events = worker_of(*(partial(seen.append, i) for i in range(5)))
    run(worker)
    assert seen == [0, 1, 2, 3, 4]
    assert all(event.done.is_set() for event in events), "each has an event, and it is done"


def test_an_event_stands_behind_its_own_work() -> None:
    """The event is set after its own work, and before the work that comes next."""
    seen: list[list[bool]] = []
    events: list[ThreadEvent]

    def look() -> None:
        seen.append([event.done.is_set() for event in events])

    worker, events = worker_of(look, look, look)
    run(worker)
    assert seen == [[False, False, False], [True, False, False], [True, True, False]], (
        "while step n runs, the events of the steps before it are set, and its own is not: an "
        "event that is set early lets the host read tokens that do not exist yet"
    )


def test_a_failure_travels_with_the_event() -> None:
    worker, (event,) = worker_of(lambda: 1 / 0)
    run(worker)
    assert event.done.is_set(), "I5: the host waits for failed work too, and must not wait for ever"
    with pytest.raises(ZeroDivisionError):
        event.wait()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_comes_after_a_failure_fails_unrun(error: type[BaseException]) -> None:
    """Step N+1 begins with the tokens of step N. An interrupt must not end the thread, either."""
    seen: list[str] = []

    def fail() -> None:
        raise error

    worker, (before, *others) = worker_of(
        lambda: seen.append("before"), fail, lambda: seen.append("after")
    )
    run(worker)
    assert seen == ["before"], "the work after the failed work must not run"
    before.wait()
    for event in others:
        assert event.done.is_set(), "I5: the host would wait for this event for ever"
        with pytest.raises(error):
            event.wait()


def test_a_failure_that_was_seen_is_over() -> None:
    """`synchronize` clears the failure: after that, the same worker runs work again."""
    worker, (failed,) = worker_of(lambda: 1 / 0)
    run(worker)
    worker.failure = None  # as `synchronize` does
    seen: list[int] = []
    event = ThreadEvent()
    worker.input_queue.put((lambda: seen.append(1), event))
    worker.input_queue.put(None)
    run(worker)
    assert seen == [1], "after synchronize work runs again"
    event.wait()
    with pytest.raises(ZeroDivisionError):
        failed.wait()


def test_waiting_is_waiting() -> None:
    event = ThreadEvent()
    waiter = threading.Thread(target=event.wait, daemon=True)
    early = ThreadEvent()
    early.done.set()
    early.wait()  # done already: it returns at once, and raises nothing
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive(), "wait returned before the work was done"
    event.done.set()
    waiter.join(PATIENCE)
    assert not waiter.is_alive(), "the work is done, and wait did not return"


def test_a_failure_that_comes_while_the_host_waits_is_raised() -> None:
    event = ThreadEvent()
    raised: list[Exception] = []

    def wait() -> None:
        try:
            event.wait()
        except Exception as error:
            raised.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(0.05)
    event.failure = ZeroDivisionError()
    event.done.set()
    waiter.join(PATIENCE)
    for error in raised:
        if error is not event.failure:
            raise error
    assert raised == [event.failure], (
        "the work failed while the host waited for it: wait must look for a failure when the work "
        "is done, not before"
    )


def test_an_event_is_set_last() -> None:
    """The host wakes when the event is set. It reads the failure and the spans at once."""
    worker, (event,) = worker_of(lambda: 1 / 0, least_seconds=0.001)
    seen: list[tuple[bool, int]] = []
    watch(event.done, "set", lambda: seen.append((event.failure is not None, len(worker.spans))))
    run(worker)
    assert seen == [(True, 1)], (
        "I5: when the event is set, it must have the failure of its work, and the span must be in "
        f"`spans`, after the sleep; (has failure, spans) were {seen}"
    )


def test_what_a_step_held_is_let_go_before_the_host_wakes() -> None:
    """I3: otherwise the host must free that memory, and the next forward waits for the host."""

    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)
    worker, (event,) = worker_of(partial(repr, held))
    del held
    seen: list[bool] = []
    watch(event.done, "set", lambda: seen.append(alive() is not None))
    run(worker)
    assert seen == [False], (
        "I3: when the event is set, the thread still holds the work (and its tensors and requests)"
    )


def test_each_forward_has_its_span() -> None:
    worker, _events = worker_of(lambda: None, lambda: 1 / 0, lambda: None, least_seconds=0.005)
    run(worker)
    spans = list(worker.spans)
    assert len(spans) == 3, "each piece of work has a span, failed or not"
    assert all(end - start >= 0.005 for start, end in spans), (
        "emulated forwards take at least 5 ms each, asleep"
    )
    assert all(a[1] <= b[0] for a, b in pairwise(spans)), "forwards run one after the other"


class VirtualClock:
    """A clock that only sleep and work move. It is also a queue that takes 10 s for each item."""

    def __init__(self, *items: Any) -> None:
        self.items = deque([*items, None])
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get(self) -> Any:
        self.sleep(10)
        return self.items.popleft()


def test_a_forward_takes_its_least_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 5 s. One forward computes for 3 s and sleeps for the rest, the other takes 7 s."""
    clock = VirtualClock()
    clock.items.extendleft([(partial(clock.sleep, s), ThreadEvent()) for s in (7, 3)])
    monkeypatch.setattr("m5_overlap.stream.time", clock)
    worker = Worker(clock, deque(), 5)  # type: ignore[arg-type]
    run(worker)
    assert list(worker.spans) == [(10, 15), (25, 32)], (
        "a span begins when there is work, here after 10 s; this work takes 3 s, so the thread "
        "sleeps for 2 s; the next one comes 10 s later and takes 7 s, so the thread does not sleep"
    )


def test_launching_does_not_wait() -> None:
    """`launch` returns while earlier work is still running: this is what overlap needs."""
    stream = ThreadStream()
    gate = threading.Event()
    seen: list[int] = []

    def blocked() -> None:
        gate.wait(PATIENCE)

    stream.launch(blocked)
    events = [stream.launch(partial(seen.append, i)) for i in range(4)]
    assert seen == [], "work after the blocked piece of work must not run"
    gate.set()
    events[2].wait()
    assert seen[:3] == [0, 1, 2]
    stream.close()
    assert seen == [0, 1, 2, 3], "close lets all launched work run"
