"""`EventClock`: the times of CUDA events on the host's clock."""

from __future__ import annotations

import time

import torch


class EventClock:
    """Converts CUDA events to seconds of `time.perf_counter`.

    CUDA only gives the time between two events, as a float32 of milliseconds: 8 us apart after a
    minute, 125 us apart after a quarter of an hour. Therefore each event is measured from the one
    before it, and not from a common zero.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait for a first event in `stream` (None: the current stream)."""
        self._latest = torch.cuda.Event(enable_timing=True)
        self._latest.record(stream)
        self._latest.synchronize()
        self._seconds = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """Return the time of an event that has completed. Events should come in their order."""
        self._seconds += self._latest.elapsed_time(event) / 1000
        self._latest = event
        return self._seconds
