"""`ForwardStream`: runs forwards one after the other, while the scheduler goes on.

Work runs in launch order, and only `event.wait()` blocks. On CUDA this is a stream and its events.
On a CPU a worker thread runs the same protocol, so that you can watch, step through and test it on
a laptop.

SGLang's overlap scheduler (v0.4) is this protocol with two threads on the way to the GPU. Its names
and ours:

    SGLang                  here
    scheduler thread        the thread that calls `step`
    forward thread          the worker of `ThreadStream`; none on CUDA: launching does not wait
    input_queue             `ThreadStream.input_queue`; on CUDA the stream itself
    sync_event              the hand-over in the queue; on CUDA `wait_stream` in `enqueuing`
    future_token_ids_map    `FutureMap`: the work reads and writes it, in launch order
    launch_done             `launch` returns: N+1 is in the queue before the host waits for N
    copy_done               the `Event` that `launch` returns
    output_queue            the `StepResult` that the event belongs to
    result_queue            `EngineCore.result_queue`: one step behind
    dummy first batch       `EngineCore.step` launches two steps if none is in flight
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from common.tracing.event_clock import EventClock

Work = Callable[[], None]
Span = tuple[float, float]  # start and end of a forward, in seconds of `time.perf_counter`
SPANS_KEPT = 4096


class Event(ABC):
    """A mark in a stream, after some work."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the work is done. Raises what the work raised."""


class ForwardStream(ABC):
    """Runs work in the order in which it was launched."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=SPANS_KEPT)  # of the forwards that have ended

    @abstractmethod
    def launch(self, work: Work) -> Event:
        """Queue `work` after everything that was launched before. Do not wait for it.

        If it fails, later work fails too, without running, until the next `synchronize`.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all launched work, and clear its failures."""

    @contextmanager
    def enqueuing(self) -> Iterator[None]:
        """Return a context in which copies to the device belong to the work launched next."""
        yield

    @abstractmethod
    def wait_before_freeing(self, owner: object) -> None:
        """If `owner` is dropped, wait for the launched work before its memory is freed."""

    @abstractmethod
    def close(self) -> None:
        """Run the work that is queued, then end the stream. Nothing can be launched afterwards."""


def open_stream(device: torch.device, emulated_forward_ms: float) -> ForwardStream:
    """Return a stream for a device. Raises `ValueError` for an emulated forward on a GPU."""
    if device.type != "cuda":
        return ThreadStream(emulated_forward_ms)
    if emulated_forward_ms > 0:
        raise ValueError(
            f"emulated_forward_ms={emulated_forward_ms:g} needs a CPU: a GPU runs real forwards"
        )
    return CudaStream(device)


class ThreadEvent(Event):
    """A `threading.Event` that also carries the failure of its work."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failure: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.failure is not None:
            raise self.failure


class ThreadStream(ForwardStream):
    """The forward stream of a CPU: a worker thread that takes work from a queue.

    emulated_forward_ms: the least time that each forward takes; the thread sleeps for the
    rest. It stands for a forward that another processor computes, which is what overlap is for.
    """

    def __init__(self, emulated_forward_ms: float = 0.0) -> None:
        super().__init__()
        self.input_queue: SimpleQueue[tuple[Work, ThreadEvent] | None] = SimpleQueue()
        self.last: ThreadEvent | None = None
        self.worker = Worker(self.input_queue, self.spans, emulated_forward_ms / 1000)
        self.thread = threading.Thread(target=self.worker.run, name="forward", daemon=True)
        # The thread holds no reference to the stream, so it ends when the engine is dropped. It
        # also ends before the interpreter does: torch crashes if it is stopped inside a forward.
        self.end = weakref.finalize(self, _end, self.thread, self.input_queue)

    def launch(self, work: Work) -> ThreadEvent:
        if self.thread.ident is None:
            self.thread.start()
        self.last = ThreadEvent()
        self.input_queue.put((work, self.last))
        return self.last

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.done.wait()
        self.worker.failure = None

    def wait_before_freeing(self, owner: object) -> None:
        """The work in the queue refers to the memory, so it cannot be freed before."""

    def close(self) -> None:
        self.end()


def _end(thread: threading.Thread, input_queue: SimpleQueue[Any]) -> None:
    """Let the thread run the queued work, and wait until it has ended."""
    input_queue.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join()


@dataclass
class Worker:
    """The forward thread's side of a `ThreadStream`."""

    input_queue: SimpleQueue[tuple[Work, ThreadEvent] | None]
    spans: deque[Span]
    least_seconds: float
    failure: BaseException | None = None

    def run(self) -> None:
        while (item := self.input_queue.get()) is not None:
            work, event = item
            started = time.perf_counter()
            if self.failure is None:
                try:
                    work()
                except BaseException as failure:
                    self.failure = failure
            # Free the work's objects before its event wakes the host. Otherwise the host runs in
            # between, and the next forward starts later. And I3: the thread must hold no request.
            del item, work
            if (rest := started + self.least_seconds - time.perf_counter()) > 0:
                time.sleep(rest)
            self.spans.append((started, time.perf_counter()))
            event.failure = self.failure
            event.done.set()
            del event


class CudaEvent(Event):
    """A `torch.cuda.Event` after a forward. `wait` records the times of the forward."""

    def __init__(self, stream: CudaStream) -> None:
        self.stream = stream
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def wait(self) -> None:
        self.ended.synchronize()
        self.stream.keep_span(self)


class CudaStream(ForwardStream):
    """A `torch.cuda.Stream`. The host runs the work at once, which only enqueues kernels."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.stream = torch.cuda.Stream(device)
        self.clock = EventClock(self.stream)

    def launch(self, work: Work) -> CudaEvent:
        event = CudaEvent(self)
        with torch.cuda.stream(self.stream):
            event.began.record()
            work()
            event.ended.record()
        return event

    def synchronize(self) -> None:
        self.stream.synchronize()

    @contextmanager
    def enqueuing(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def wait_before_freeing(self, owner: object) -> None:
        weakref.finalize(owner, self.stream.synchronize)

    def close(self) -> None:
        self.synchronize()

    def keep_span(self, event: CudaEvent) -> None:
        """Record the times of a forward after its event has completed."""
        self.spans.append((self.clock.seconds(event.began), self.clock.seconds(event.ended)))
