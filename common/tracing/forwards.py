"""The times of forwards, from the engine's own stream or from hooks of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from ..clock import Clock
from .event_clock import EventClock

Interval = tuple[float, float]  # begin and end, in seconds of the engine's clock


class Forwards(Protocol):
    """A source of the times of forwards."""

    def take(self) -> list[Interval]:
        """Return the intervals of forwards that ended since the last call, the oldest first."""


class StreamForwards:
    """Times from an engine that runs forwards on its own stream: the stream records them."""

    def __init__(self, spans: deque[Interval]) -> None:
        self.spans = spans
        self._taken_until = spans[-1][1] if spans else 0.0

    def take(self) -> list[Interval]:
        new: list[Interval] = []
        for span in reversed(self.spans.copy()):  # a copy: another thread appends to it
            if span[1] <= self._taken_until:
                break
            new.append(span)
        if new:
            self._taken_until = new[0][1]
        return new[::-1]


class HookedForwards:
    """Times from hooks of the model.

    Other engines may share the model, so only calls during which `is_ours()` is true are recorded.
    On CUDA, a call returns long before its work is done, so the marks are events in the stream. In
    virtual time there are none.
    """

    def __init__(
        self, model: torch.nn.Module, is_ours: Callable[[], bool], undo: ExitStack, clock: Clock
    ) -> None:
        self.is_ours = is_ours
        self.marks: list[Any] = []  # begin, end, begin, end, ...
        parameter = next(model.parameters())
        self.device, self.clock = parameter.device, clock
        self.events: EventClock | None = None
        if parameter.is_cuda and not clock.is_virtual:
            self.events = EventClock(torch.cuda.current_stream(self.device))
        begin = model.register_forward_pre_hook(self._hook)
        undo.callback(begin.remove)
        end = model.register_forward_hook(self._hook, always_call=True)  # even if it raises
        undo.callback(end.remove)

    def take(self) -> list[Interval]:
        times = [self._seconds(mark) for mark in self.marks]
        self.marks = []
        return list(zip(times[::2], times[1::2], strict=True))

    def _hook(self, *_args: Any) -> None:
        if self.is_ours():
            self.marks.append(self._mark())

    def _mark(self) -> Any:
        if self.events is None:
            return self.clock.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # of `cuda:1`, if the model is there
        return event

    def _seconds(self, mark: Any) -> float:
        if self.events is None:
            return float(mark)
        mark.synchronize()
        return self.events.seconds(mark)
