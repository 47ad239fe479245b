"""Signals are held back while an engine changes its state, and delivered when the state is whole.

Python runs the handler of a signal in the main thread, between any two bytecodes. A handler that
raises, as Ctrl-C does (`KeyboardInterrupt`), could stop a step after it has freed a page and before
it has removed the request. No `except` clause can put every such moment right. So the handlers are
replaced for the time of a call, and run at its end:

    with interrupts_held() as held:
        ...                # a signal that arrives here waits
        held.deliver()     # ... until here, where a caller is ready for the exception,
        ...
                           # ... or until the end of the block

Only the main thread runs handlers; in other threads there is nothing to hold back.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

# Signals that programs handle. To look at all 64 in each step would take longer than to hold one.
NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "VTALRM", "PROF", "USR1", "USR2", "CHLD", "WINCH")
SIGNALS = [int(getattr(signal, f"SIG{name}")) for name in NAMES if hasattr(signal, f"SIG{name}")]

Handler = Callable[[int, FrameType | None], Any]


class HeldInterrupts:
    """Replaces the handlers of signals while it is open. Opening it again inside is allowed."""

    def __init__(self) -> None:
        self.depth = 0  # how often it has been opened; at 0, signals go straight to their handlers
        self.handlers: dict[int, Handler] = {}  # what `_hold` stands in for
        self.arrived: list[int] = []  # signals that wait, oldest first
        self.was_forced = False  # a second Ctrl-C went through: see `_hold`

    def __enter__(self) -> Self:
        if self.depth == 0:
            self.was_forced = False
            for signum in SIGNALS:
                handler = signal.getsignal(signum)
                if callable(handler) and handler != self._hold:
                    self.handlers[signum] = handler
                    signal.signal(signum, self._hold)
        # Not before: an exception of a handler that was not replaced yet leaves the block unopened.
        self.depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.depth > 1:
            self.depth -= 1
            return
        try:
            for signum, handler in self.handlers.items():
                if signal.getsignal(signum) == self._hold:  # the block may have installed another
                    signal.signal(signum, handler)
        finally:
            self.depth = 0
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of the signals that have arrived. Raises what they raise.

        In a block inside another one, signals go on waiting for the outer one.
        """
        while self.arrived and self.depth <= 1:
            signum = self.arrived.pop(0)
            try:
                self.handlers[signum](signum, sys._getframe(1))
            except BaseException:
                self.deliver()  # an exception of the first does not lose the second
                raise

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        """Stand in for a handler. While the block is closed, signals go through to it.

        A second Ctrl-C is not held back: a step that never ends can be stopped. The engine is then
        in an unknown state, and refuses all further calls.
        """
        is_forced = signum == signal.SIGINT and signum in self.arrived
        if self.depth > 0 and not is_forced:
            self.arrived.append(signum)
            return
        self.was_forced = is_forced
        self.handlers[signum](signum, frame)


class _NothingHeld(HeldInterrupts):
    """What threads other than the main thread get."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def deliver(self) -> None:
        """Do nothing: no signal is held back here."""


_main_thread = HeldInterrupts()
_other_threads = _NothingHeld()


def interrupts_held() -> HeldInterrupts:
    """Return the context manager that holds signals back in this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return _main_thread if is_main else _other_threads
