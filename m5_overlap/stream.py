"""`ForwardStream`: where forwards run, one after the other, while the scheduler goes on.

Work that is launched runs after all that was launched before it, and nobody waits for it but who
asks its event. On CUDA that is a stream and its events. On a CPU the same protocol runs on a worker
thread, so that it can be seen, stepped through and tested on a laptop.

SGLang's overlap scheduler (v0.4) is this protocol with two threads on the way to the GPU. By name:

    SGLang                  here
    scheduler thread        whoever calls `step`
    forward thread          the worker of `ThreadStream`; none on CUDA: launching does not wait
    input_queue             `ThreadStream.input_queue`; on CUDA the stream itself
    sync_event              the queue's hand-over; on CUDA `wait_stream` in `enqueuing`
    future_token_ids_map    `FutureMap`, written and read by the work, in order
    launch_done             `launch` returns: N+1 is in the queue before N's result is waited for
    copy_done               the `Event` that `launch` returns
    output_queue            the `StepResult` that the event belongs to
    result_queue            `LLMEngine.result_queue`: one step behind
    dummy first batch       `LLMEngine.step` launches two steps when there is none in flight
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

from common.cpu_runtime import release_threads

Work = Callable[[], None]
Span = tuple[float, float]  # when a forward began and ended, in seconds of `time.perf_counter`
SPANS_KEPT = 4096


class Event(ABC):
    """A mark behind some work of a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Let the host wait until the work is done. Raises what the work raised."""


class ForwardStream(ABC):
    """Runs work in the order in which it was launched."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=SPANS_KEPT)  # of the forwards that have ended

    @abstractmethod
    def launch(self, work: Work) -> Event:
        """Have `work` run after all that was launched before; do not wait for it.

        If it fails, what was launched after it fails too, unrun, until the next `synchronize`.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that was launched, and forget its failures."""

    @contextmanager
    def enqueuing(self) -> Iterator[None]:
        """Copies to the device that are made here are part of what is launched next."""
        yield

    @abstractmethod
    def close(self) -> None:
        """What was launched still runs; nothing is launched any more."""


def open_stream(device: torch.device, emulated_forward_ms: float) -> ForwardStream:
    """The stream of a device. Raises `ValueError` where a GPU's forward should be emulated."""
    if device.type != "cuda":
        return ThreadStream(emulated_forward_ms)
    if emulated_forward_ms > 0:
        raise ValueError("emulated_forward_ms is for CPUs: a GPU's forward takes what it takes")
    return CudaStream(device)


class ThreadEvent(Event):
    """`threading.Event`, with the failure of the work it stands behind."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failure: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.failure is not None:
            raise self.failure


class ThreadStream(ForwardStream):
    """A worker thread that takes work from a queue: a CPU's forward stream.

    emulated_forward_ms: let each piece of work take at least so long, asleep. It stands in for a
    forward that another processor computes, which is what overlapping is for.
    """

    def __init__(self, emulated_forward_ms: float = 0.0) -> None:
        super().__init__()
        self.input_queue: SimpleQueue[tuple[Work, ThreadEvent] | None] = SimpleQueue()
        self.last: ThreadEvent | None = None
        self.worker = Worker(self.input_queue, self.spans, emulated_forward_ms / 1000)
        self.thread = threading.Thread(target=self.worker.run, name="forward", daemon=True)
        # The thread does not hold the stream: an engine that is dropped takes its thread along. And
        # it ends before the interpreter does: torch does not survive being cut off in between.
        self.end = weakref.finalize(self, _end, self.thread, self.input_queue)

    def launch(self, work: Work) -> ThreadEvent:
        if self.thread.ident is None:
            self.thread.start()
        release_threads()
        self.last = ThreadEvent()
        self.input_queue.put((work, self.last))
        return self.last

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.done.wait()
        self.worker.failure = None

    def close(self) -> None:
        self.end()


def _end(thread: threading.Thread, input_queue: SimpleQueue[Any]) -> None:
    """What was launched runs, and then the thread is gone."""
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
            # Free what the work held before its event wakes the host: else the host gets a turn
            # in between, and the next forward waits for it. And I3: the thread keeps no request.
            del item, work
            if (rest := started + self.least_seconds - time.perf_counter()) > 0:
                time.sleep(rest)
            self.spans.append((started, time.perf_counter()))
            event.failure = self.failure
            event.done.set()
            del event


class CudaEvent(Event):
    """A `torch.cuda.Event` behind a forward; its time is kept once it is known."""

    def __init__(self, stream: CudaStream) -> None:
        self.stream = stream
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def wait(self) -> None:
        self.ended.synchronize()
        self.stream.keep_span(self)


class CudaStream(ForwardStream):
    """A `torch.cuda.Stream`. Work is run at once by the host, which only enqueues what it says."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.stream = torch.cuda.Stream(device)
        # Event times are relative to one another: this one ties them to the host's clock.
        self.zero = torch.cuda.Event(enable_timing=True)
        self.zero.record(self.stream)
        self.zero.synchronize()
        self.zero_seconds = time.perf_counter()

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

    def close(self) -> None:
        pass

    def keep_span(self, event: CudaEvent) -> None:
        """The event has been waited for: its times are there."""
        began, ended = (self.zero.elapsed_time(x) / 1000 for x in (event.began, event.ended))
        self.spans.append((self.zero_seconds + began, self.zero_seconds + ended))
