"""`Turns`: engines that share one model step one after the other.

The lock of the model (`common/hf/shared.py`) already admits one forward at a time. Without turns,
however, forwards of several engines would wait for each other in the middle of steps: a recording
would show these waits as if its own engine took the time, and its hooks on the model would see the
forwards of the others. Therefore one engine has the model for a whole step.

An engine with overlap has a forward in flight when `step` returns. If it has the next turn too, the
next step begins while this forward runs. Another engine first waits until the forward has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import ref

from common import LLMEngine


class Turns:
    """A lock for the engines of one model. They get it in the order in which they asked for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._order: deque[object] = deque()  # the first one has the turn
        self._last: ref[LLMEngine] | None = None  # the engine that had the turn before

    @contextlib.contextmanager
    def turn(self, engine: LLMEngine | None = None) -> Iterator[None]:
        """Return a context in which no other engine computes. None: for an engine that is built."""
        place = object()
        with self._changed:
            self._order.append(place)
            self._changed.wait_for(lambda: self._order[0] is place)
        try:
            self._wait_for_forward(engine)
            yield
        finally:
            with self._changed:
                self._order.popleft()
                self._changed.notify_all()

    def _wait_for_forward(self, engine: LLMEngine | None) -> None:
        """Wait for the forward in flight, unless it is that of the same engine."""
        last: Any = None if self._last is None else self._last()
        self._last = None if engine is None else ref(engine)
        if last is None or last is engine:
            return
        if hasattr(last.core.runner, "synchronize"):  # an engine with overlap
            with contextlib.suppress(Exception):  # its own next step raises it
                last.core.runner.synchronize()
