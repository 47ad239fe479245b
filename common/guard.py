"""`Guard`: rules that every public call of an engine follows.

    with self.guard("step") as call:
        ...
        return call.keep(outputs)

- One thread and one process. An engine has no locks, so a call from a second thread could see or
  leave a half-done step. Such a call is refused. A call after `fork` is refused too, because the
  child process has no forward thread.
- An interrupt (Ctrl-C, the handler of a timer) never stops a call half-way. Python runs the handler
  of a signal between any two bytecodes. Its exception could stop a step after it has freed a page
  and before it has removed the request, and no `except` clause can repair the state at every such
  moment. Therefore the handlers are replaced for the time of a call, and they run at its end. A
  result that the caller did not receive is not lost: the next call begins by taking it back.
- The garbage collector may drop a stream in the middle of a step, or in another thread. The request
  of that stream is then aborted at the beginning of the next call.
- After an exception in the middle of a step, the state of the engine is unknown and its answers
  cannot be trusted. The engine then refuses all further calls with `EngineDeadError`, except those
  in `LOOKING`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
Handler = Callable[[int, "FrameType | None"], Any]
Exit = Callable[
    ["type[BaseException] | None", "BaseException | None", "TracebackType | None"], None
]

LOOKING = ("stats", "check_invariants", "has_unfinished_requests", "close")  # even if it is dead
# The signals that programs usually handle. Checking all 64 signals in each step would be too slow.
NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "VTALRM", "PROF", "USR1", "USR2", "CHLD", "WINCH")
SIGNALS = [int(getattr(signal, f"SIG{name}")) for name in NAMES if hasattr(signal, f"SIG{name}")]


class EngineDeadError(RuntimeError):
    """The engine failed in the middle of a step, and its state is unknown. Create a new engine."""


class Guard:
    """One public call: it checks the caller, and holds interrupts back until the call ends."""

    def __init__(self, caller: Caller, name: str, settle: Callable[[], None]) -> None:
        """settle: finishes what earlier calls left. An outermost call begins with it, if needed."""
        self.caller = caller
        self.name = name
        self.settle = settle
        self.held = interrupts_held()
        self.returned: Any = None

    def __enter__(self) -> Self:
        caller = self.caller
        caller.check(self.name)
        if self.name not in LOOKING:
            caller.check_alive()
        if self.name == "step":
            caller.thread = threading.current_thread()
        self.held.__enter__()
        try:
            if caller.depth == 0 and (caller.undelivered is not None or caller.abandoned):
                self.settle()
        except BaseException as error:
            self.held.__exit__(type(error), error, None)
            raise
        caller.depth += 1
        return self

    def keep(self, returned: T) -> T:
        """Note what the call returns, so that an interrupt at its end does not lose it."""
        self.returned = returned
        return returned

    @property
    def __exit__(self) -> Exit:
        """A function, and not a method: after a function, Python does not look for signals.

        After a method, it does so in the frame of the `with` block, where nothing holds them back:
        an interrupt there would lose the result. After a function, it looks when the caller has the
        result. (Python 3.10 looks after both.)
        """

        def leave(
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            self.caller.depth -= 1
            if error is not None:
                self.caller.judge(self.name, error, self.held.was_forced)
            try:
                self.held.__exit__(kind, error, traceback)
            except BaseException:
                # A signal that was held back is raised here. Python checks for signals when a
                # function is called. This clause calls none, so no other signal can arrive before
                # `undelivered` is set.
                if self.returned is not None:
                    self.caller.undelivered = (self.name, self.returned)
                raise

        return leave


class Caller:
    """The process and the thread that may call an engine, and the exception that ended it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.thread: threading.Thread | None = None  # the thread that called `step` last
        self.killed_by: BaseException | None = None
        self.depth = 0  # calls in progress, one inside the other
        self.undelivered: tuple[str, Any] | None = None  # an interrupted call and its result
        self.abandoned: list[str] = []  # requests of streams dropped during a call

    def check(self, name: str) -> None:
        """Raise `RuntimeError` if this process or this thread may not call the engine."""
        if os.getpid() != self.process:
            raise RuntimeError(
                f"{name}: the engine was made in process {self.process}, and this is process "
                f"{os.getpid()}. A fork has no forward thread: make the engine in the child."
            )
        thread = threading.current_thread()
        if self.thread is not None and self.thread is not thread and self.thread.is_alive():
            raise RuntimeError(
                f"{name}: called from thread {thread.name!r}, but {self.thread.name!r} steps this "
                "engine. One thread makes all calls: pass requests to it through a queue."
            )

    def judge(
        self, name: str, error: BaseException, was_forced: bool, is_undone: bool = False
    ) -> None:
        """Mark the engine as dead if an exception may have left its state half-changed.

        After a forward that was undone, the state is whole, with three exceptions: an invariant was
        broken, a rank has ended, or a second Ctrl-C may have interrupted the undoing. The innermost
        call decides.
        """
        if "is_judged" in vars(error):
            return
        vars(error)["is_judged"] = True
        changes = name in ("step", "abort_request")
        is_final = not is_undone or isinstance(error, (AssertionError, EngineDeadError))
        if was_forced or (changes and is_final):
            self.killed_by = error

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine failed in the middle of a step."""
        if self.killed_by is not None:
            raise EngineDeadError(
                "the engine failed in the middle of a step, and its state is unknown: make a new "
                f"one ({type(self.killed_by).__name__}: {self.killed_by})"
            ) from self.killed_by


class HeldInterrupts:
    """Replaces the handlers of signals while it is open. It may be opened more than once.

        with interrupts_held() as held:
            ...                # a signal that arrives here waits
            held.deliver()     # ... until here, where the caller is ready for the exception,
            ...
                               # ... or until the end of the block

    Only the main thread runs handlers. In other threads there is nothing to hold back.
    """

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

    def __exit__(self, *_: object) -> None:
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
