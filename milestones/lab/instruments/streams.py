"""Two forward streams that run their work as early, and as late, as events allow.

An engine that is right on both does not depend on the time when a forward runs. The two streams
make races deterministic. The late stream shows a write to memory that a step in flight still reads.
The early stream shows a read of memory that is not written yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

Work = Callable[[], None]


class HandEvent:
    """An event that is done when its stream has run the work before it."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.is_done = False
        self.failure: BaseException | None = None

    def wait(self) -> None:
        """Let the stream run up to this event. Raises the error of the work."""
        self.stream.num_waits += 1
        self.stream.run_until(self)
        if self.failure is not None:
            raise self.failure


class LateStream:
    """Runs work only when something waits for its event, and then no more than that work."""

    def __init__(self) -> None:
        self.spans: deque[tuple[float, float]] = deque()
        self.pending: deque[tuple[Work, HandEvent]] = deque()
        self.failure: BaseException | None = None
        self.num_waits = 0

    def launch(self, work: Work, is_forward: bool = True) -> HandEvent:
        event = HandEvent(self)
        self.pending.append((work, event))
        return event

    def run_until(self, event: HandEvent) -> None:
        """Run the pending work, oldest first, until this event is done."""
        while not event.is_done:
            work, done = self.pending.popleft()
            begin = time.perf_counter()
            if self.failure is None:
                try:
                    work()
                except BaseException as failure:
                    self.failure = failure
            self.spans.append((begin, time.perf_counter()))
            done.failure = self.failure
            done.is_done = True

    def synchronize(self) -> None:
        if self.pending:
            self.run_until(self.pending[-1][1])
        self.failure = None

    def enqueuing(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        """Nothing to end."""


class EarlyStream(LateStream):
    """Runs work as soon as it is launched."""

    def launch(self, work: Work, is_forward: bool = True) -> HandEvent:
        event = super().launch(work, is_forward)
        self.run_until(event)
        return event
