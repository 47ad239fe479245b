"""`Clock`: the time of an engine. It is the machine's, or the virtual one of a step model.

The times of a run tell about the machine: how busy it is, and how fast. In virtual time, a run
takes the same time on every machine. The real model still computes every token. Only the readings
of the clock are those of a model of a step (`StepCosts`). So engines can be compared by them,
although another process uses the CPU. `virtual_time.py` lets an engine run in virtual time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepCosts:
    """What a step takes in virtual time, in milliseconds. The default is a small model on a GPU.

    A token is a position that the forward computes: padding, and what is computed again, count.
    """

    host: float = 0.4
    host_row: float = 0.1  # of the host, for each request of the step
    forward: float = 3.0
    forward_token: float = 0.05

    def __str__(self) -> str:
        return (
            f"host {self.host:.3g} ms + {self.host_row:.2g} ms a request, "
            f"forward {self.forward:.3g} ms + {self.forward_token:.2g} ms a token"
        )

    def host_seconds(self, num_requests: int) -> float:
        """Return the time in which the host plans a step, and processes its result."""
        return (self.host + self.host_row * num_requests) / 1000

    def forward_seconds(self, num_tokens: int) -> float:
        """Return the time of one forward of so many positions."""
        return (self.forward + self.forward_token * num_tokens) / 1000


class Clock:
    """The machine's clock."""

    is_virtual = False

    def now(self) -> float:
        """Return the time in seconds, from an origin of no meaning."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(eq=False)
class Work:
    """Work of the device: when it may begin, the seconds that its parts take, and when it ended."""

    begin: float
    seconds: float = 0.0
    num_forwards: int = 0

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class VirtualClock(Clock):
    """The host's time. It goes on when the host works, and when the host waits for the device."""

    is_virtual = True

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.words = str(costs)  # an elective adds what its own work takes
        self.host_time = 0.0
        self._thread = threading.local()  # `work`: what this thread computes for the device

    def now(self) -> float:
        """Return the time of the host, or inside of work of the device, the time in this work."""
        return self.host_time if self.work is None else self.work.end

    def sleep(self, seconds: float) -> None:
        self.host_time += max(0.0, seconds)

    @property
    def work(self) -> Work | None:
        """Return the work of the device that this thread computes; None for the host."""
        return getattr(self._thread, "work", None)

    @contextmanager
    def computing(self, model: Any, work: Work | None = None, share: float = 1.0) -> Iterator[None]:
        """Return a context in which this thread computes a step, and calls of the model take time.

        work: of the device. None: the host waits for each forward.
        share: of the time that a forward takes, for a smaller model.
        """
        thread, before = threading.get_ident(), self.work

        def forward_ended(_model: Any, args: Any, kwargs: Any, _output: Any) -> None:
            # Another engine may share the model. Work that waits may let other work run before it.
            if threading.get_ident() == thread and self.work is work:
                input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                self.forward_ended(input_ids, share)

        hook = model.register_forward_hook(
            forward_ended, prepend=True, with_kwargs=True, always_call=True
        )
        self._thread.work = work
        try:
            yield
        finally:
            self._thread.work = before
            hook.remove()

    def forward_ended(self, input_ids: Any, share: float = 1.0) -> None:
        """Charge a forward of these positions, of any shape."""
        self.charge(share * self.costs.forward_seconds(input_ids.numel()))
        if self.work is not None:
            self.work.num_forwards += 1

    def wait_until(self, end: float) -> None:
        """Let the host, or the work of this thread, wait for something that ends at `end`."""
        if self.work is None:
            self.host_time = max(self.host_time, end)
        else:
            self.work.begin = max(self.work.begin, end - self.work.seconds)

    def charge(self, seconds: float) -> None:
        """Add what something takes, to the work of this thread or to the host."""
        if self.work is None:
            self.host_time += seconds
        else:
            self.work.seconds += seconds
