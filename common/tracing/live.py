"""`LiveTrace`: a trace that other threads read while it is recorded. Its memory is bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

from ..llm_engine import LLMEngine
from .data import TraceData
from .trace import Trace

STEPS_KEPT = 512  # a reader that is further behind begins again with a snapshot


class LiveTrace(Trace):
    """Keeps the newest steps. A step never waits for a reader.

    Each step is a `TraceData` with one frame, and with the requests, spans and forwards that are
    new or changed. The engine's thread opens and closes the trace and takes snapshots.
    """

    def __init__(self, engine: LLMEngine, steps_kept: int = STEPS_KEPT) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()  # guards `_steps`
        self._steps: deque[TraceData] = deque(maxlen=steps_kept)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def snapshot(self) -> TraceData:
        """Return the current state as a trace of one frame. Later steps continue it."""
        requests, frame = self._observer.snapshot(self._step, self.engine.now())
        return TraceData(self.data.meta, self.data.origin, requests, frames=[frame])

    def since(self, step: int) -> TraceData | None:
        """Return what was recorded after a step; None if a part of it is no longer kept."""
        with self._lock:
            missed = self._steps[-1].frames[0].step - step if self._steps else 0
            if missed > len(self._steps):
                return None
            parts = list(islice(reversed(self._steps), max(0, missed)))[::-1]
        return joined(self.data, parts)

    def _after_step(self, started: float) -> None:
        super()._after_step(started)
        data, news = self.data, self._observer.news
        step = TraceData({}, data.origin, news, data.spans, data.forwards, data.frames[-1:])
        data.requests.clear()
        data.spans, data.forwards, data.frames = [], [], []
        with self._lock:
            self._steps.append(step)


def joined(whole: TraceData, parts: Sequence[TraceData]) -> TraceData:
    """Return consecutive parts of a trace as one."""
    return TraceData(
        whole.meta,
        whole.origin,
        [request for part in parts for request in part.requests],
        [span for part in parts for span in part.spans],
        [span for part in parts for span in part.forwards],
        [frame for part in parts for frame in part.frames],
    )
