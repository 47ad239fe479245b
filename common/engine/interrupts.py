"""Hold signals back while an engine changes its state, and deliver them when the state is whole.

Python runs the handler of a signal in the main thread, between any two bytecodes. The handler of
Ctrl-C raises `KeyboardInterrupt`. This could stop a step after it has freed a page and before it
has removed the request. No `except` clause can repair the state at every such moment. Therefore the
handlers are replaced for the time of a call, and they run at its end:

    with interrupts_held() as held:
        ...                # a signal that arrives here waits
        held.deliver()     # ... until here, where the caller is ready for the exception,
        ...
                           # ... or until the end of the block

Only the main thread runs handlers. In other threads there is nothing to hold back.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

# The signals that programs usually handle. Checking all 64 signals in each step would be too slow.
NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "VTALRM", "PROF", "USR1", "USR2", "CHLD", "WINCH")
SIGNALS = [int(getattr(signal, f"SIG{name}")) for name in NAMES if hasattr(signal, f"SIG{name}")]

Handler = Callable[[int, FrameType | None], Any]


class HeldInterrupts:
    """Replaces the handlers of signals while it is open. It may be opened more than once."""

    def __init__(self) -> None:
        self.depth = 0  # how often it is open; at 0, signals go directly to their handlers
        self.handlers: dict[int, Handler] = {}  # the handlers that `_hold` replaces
        self.arrived: list[int] = []  # signals that wait, the oldest first
        self.was_forced = False  # a second Ctrl-C was not held back: see `_hold`

    def __enter__(self) -> Self:
        if self.depth == 0:
            self.was_forced = False
            for signum in SIGNALS:
                handler = signal.getsignal(signum)
                if callable(handler) and handler != self._hold:
                    self.handlers[signum] = handler
                    signal.signal(signum, self._hold)
        # Only now: if a handler that is not replaced yet raises, the block must not count as open.
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
                if signal.getsignal(signum) == self._hold:  # the block may have changed it
                    signal.signal(signum, handler)
        finally:
            self.depth = 0
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of the signals that have arrived. Raises the exceptions of the handlers.

        In a nested block, signals continue to wait until the outer block is ready.
        """
        while self.arrived and self.depth <= 1:
            signum = self.arrived.pop(0)
            try:
                self.handlers[signum](signum, sys._getframe(1))
            except BaseException:
                self.deliver()  # if one handler raises, the others still run
                raise

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        """Record a signal in place of its handler. While the block is closed, call the handler.

        A second Ctrl-C is not held back, so that a user can stop a step that never ends. The engine
        is then in an unknown state, and refuses all further calls.
        """
        is_forced = signum == signal.SIGINT and signum in self.arrived
        if self.depth > 0 and not is_forced:
            self.arrived.append(signum)
            return
        self.was_forced = is_forced
        self.handlers[signum](signum, frame)


class _NothingHeld(HeldInterrupts):
    """The context manager for threads other than the main thread."""

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
