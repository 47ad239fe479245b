"""`Watchdog`: ends the process when a schedule hangs, and prints where it hangs.

Counting steps cannot detect a call that never returns, for example a call that waits for an event.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HANG_SECONDS = 300.0  # of one schedule, which takes a second, or 20 with one token per step
EXIT_STATUS = 1


class Watchdog:
    """Watches one schedule at a time, from its own thread."""

    def __init__(self, seconds: float = HANG_SECONDS) -> None:
        self.seconds = seconds
        self.running: str | None = None  # the command of the running schedule
        self.is_closed = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the end of the block."""
        self.thread.start()
        try:
            yield
        finally:
            self.tell(None, closes=True)
            self.thread.join()

    def tell(self, command: str | None, closes: bool = False) -> None:
        """Record that a schedule has begun, or with None that it has ended."""
        with self.changed:
            self.running = command
            self.is_closed = closes
            self.changed.notify()

    def _watch(self) -> None:
        with self.changed:
            while not self.is_closed:
                limit = None if self.running is None else self.seconds
                if not self.changed.wait(limit):
                    self._end()

    def _end(self) -> None:
        sys.stderr.write(
            f"stuck: a schedule has not ended in {self.seconds:.0f} seconds\n    {self.running}\n"
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(EXIT_STATUS)
