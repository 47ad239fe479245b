"""Streams at the two ends of what a forward stream may do: as early and as late as events allow.

What is right on both, and on a thread in between, does not depend on when a forward runs. Races
become deterministic: who writes what a step in flight still reads is seen on the late one, and who
reads what it has not written yet on the early one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

Work = Callable[[], None]


class HandEvent:
    """An event that is done when its stream has come so far."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.is_done = False
        self.failure: BaseException | None = None

    def wait(self) -> None:
        self.stream.num_waits += 1
        self.stream.run_until(self)
        if self.failure is not None:
            raise self.failure


class LateStream:
    """Runs nothing before somebody waits for it, and then no more than that takes."""

    def __init__(self) -> None:
        self.spans: deque[tuple[float, float]] = deque()
        self.pending: deque[tuple[Work, HandEvent]] = deque()
        self.failure: BaseException | None = None
        self.num_waits = 0

    def launch(self, work: Work) -> HandEvent:
        event = HandEvent(self)
        self.pending.append((work, event))
        return event

    def run_until(self, event: HandEvent) -> None:
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
        return _Nothing()

    def close(self) -> None:
        """Nothing to end."""


class EarlyStream(LateStream):
    """Runs everything the moment it is launched."""

    def launch(self, work: Work) -> HandEvent:
        event = super().launch(work)
        self.run_until(event)
        return event


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
