"""Interrupts at random moments inside a call: a real Ctrl-C, or a real interval timer.

A signal counts as delivered when its handler raises inside the engine. The handler ignores a signal
that arrives in the soak's own code (between two calls, or in an audit). There it could only make
the soak itself lose an output.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from common import guard

from ..instruments import audit
from .checker import Progress

SOAK = str(Path(__file__).parent)
OWN_WORK = (audit.audit.__code__, Progress.check.__code__)  # this code calls the engine too
MOST_EVENTS = 3.5  # a Ctrl-C arrives within the first 10 ** 3.5 calls and returns of Python
TIMER_SECONDS = (2e-5, 5e-3)

Value = TypeVar("Value")


class TimerError(Exception):
    """The error that the handler of the interval timer raises."""


class Interrupter:
    """Runs calls, and interrupts some of them: at most one interrupt in one call."""

    def __init__(self) -> None:
        self.delivered = 0
        self.stop_requested = False  # a person pressed Ctrl-C
        self.armed = False
        self.sent = False  # the next Ctrl-C was sent by this class
        # Python 3.11 does not survive a profile hook while another thread runs Python code.
        self.can_count_calls = True

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Install the handlers of both signals."""
        before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGALRM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def call(
        self, chance: random.Random, function: Callable[[], Value]
    ) -> tuple[Value | None, bool]:
        """Call a function with an interrupt on its way. Return its value, and whether it hit."""
        before = self.delivered
        use_timer = chance.random() < 0.5 or not self.can_count_calls
        arm = self._arm_timer if use_timer else self._arm_ctrl_c
        arm(chance)
        try:
            return function(), False
        except (KeyboardInterrupt, TimerError):
            if self.delivered == before:
                raise
            return None, True
        finally:
            self.armed = False
            sys.setprofile(None)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _arm_timer(self, chance: random.Random) -> None:
        low, high = TIMER_SECONDS
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, low * (high / low) ** chance.random())

    def _arm_ctrl_c(self, chance: random.Random) -> None:
        """Send a SIGINT when Python has made a random number of calls and returns."""
        self.armed = True
        self.left = int(10 ** chance.uniform(0, MOST_EVENTS))
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _arg: Any) -> None:
        self.left -= 1
        if self.left <= 0 and not _is_past_handlers(frame, event):
            sys.setprofile(None)
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.sent:
            self.stop_requested = True
            return
        self.sent = self.sent and number != signal.SIGINT
        if self.armed and _is_in_engine(frame):
            self.armed = False
            self.delivered += 1
            raise KeyboardInterrupt if number == signal.SIGINT else TimerError


def _is_past_handlers(frame: FrameType, event: str) -> bool:
    """Return whether a call of the engine returns to the code of the soak, or its guard has ended.

    An exception of a profile hook would be raised outside all handlers of the engine, and would
    replace the result. No signal does that: Python handles it in the caller, at its next call.
    """
    caller = frame.f_back
    if event != "return" or caller is None:
        return False
    is_guard = (frame.f_code.co_filename, frame.f_code.co_name) == (guard.__file__, "leave")
    return is_guard or caller.f_code.co_filename.startswith(SOAK)


def _is_in_engine(frame: FrameType | None) -> bool:
    """Return whether code of an engine was running, and not the soak's own code."""
    while frame is not None and frame.f_code is Interrupter._count.__code__:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename in (audit.__file__, __file__):
        return False
    if frame.f_code.co_filename.startswith(SOAK):
        return False
    while frame is not None:
        if frame.f_code in OWN_WORK:
            return False
        frame = frame.f_back
    return True
