"""Streams and events of the fake GPU, with vector clocks, which say what has waited for what.

The clock of a stream, or of the host, says how far the work of each other one is known to be done
(Fidge 1988, Mattern 1989). `fake_memory.py` compares it with the last accesses to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Clock = dict[str, int]  # how far the work of each stream, and of the host, is known to be done


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know what `other` knows: something has waited."""
    for actor, time in other.items():
        clock[actor] = max(clock.get(actor, 0), time)


@dataclass(eq=False)
class FakeStream:
    """A stream. Its work has run when the call that queues it returns."""

    cuda: Any  # the `FakeCuda`
    name: str
    device: str = "cuda:0"
    clock: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = f"{self.name} {len(self.cuda.clocks)}"
        self.cuda.clocks[self.number] = self.clock

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.record(self.name, "waits for", other.name)
        self.cuda.ordered(self.clock, other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.record(self.name, "waits for event")
        self.cuda.ordered(self.clock, event.clock)

    def synchronize(self) -> None:
        self.cuda.refuse_while_capturing()
        self.cuda.record("synchronize", self.name)
        self.cuda.ordered(self.cuda.host, self.clock)


@dataclass(eq=False)
class FakeEvent:
    """An event with the time of the fake clock."""

    cuda: Any  # the `FakeCuda`
    at: float | None = None
    clock: Clock = field(default_factory=dict)

    def record(self, stream: FakeStream | None = None) -> None:
        self.at = self.cuda.now
        self.clock = dict((stream or self.cuda.current).clock)
        self.cuda.record("event", (stream or self.cuda.current).name)

    def synchronize(self) -> None:
        self.cuda.refuse_while_capturing()
        self.cuda.record("synchronize", "event")
        self.cuda.ordered(self.cuda.host, self.clock)

    def elapsed_time(self, other: FakeEvent) -> float:
        """Return milliseconds as CUDA does: a float32."""
        assert self.at is not None and other.at is not None, "an event was not recorded"
        return float(np.float32((other.at - self.at) * 1000))
