"""Turn Ctrl-C and SIGTERM into an exception, so that a batch ends with all grades it has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptedBySignal(KeyboardInterrupt):
    """A signal has asked the grader to end."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise `InterruptedBySignal` in this thread for Ctrl-C and SIGTERM."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise InterruptedBySignal(number)

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
