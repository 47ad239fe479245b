"""`guarded`: rules that every public call of an engine follows.

- One thread and one process. An engine has no locks, so a call from a second thread could see or
  leave a half-done step. Such a call is refused. A call after `fork` is refused too, because the
  child process has no forward thread.
- An interrupt (Ctrl-C, the handler of a timer) never stops a call half-way: see `interrupts`. The
  result of the interrupted call is not lost: the next call begins by taking it back.
- The garbage collector may drop a stream in the middle of a step, or in another thread. The request
  of that stream is then aborted at the beginning of the next call.
- After an exception in the middle of a step, the state of the engine is unknown and its answers
  cannot be trusted. The engine then refuses all further calls with `EngineDeadError`, except those
  in `LOOKING`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .interrupts import interrupts_held

if TYPE_CHECKING:
    from ..request import Request
    from .failure_isolation import FailureIsolation

Method = TypeVar("Method", bound=Callable[..., Any])

CHANGING = (
    "add_request", "step", "abort_request", "reset_prefix_cache", "generate", "embed", "stream",
)  # fmt: skip
LOOKING = ("stats", "check_invariants", "has_unfinished_requests", "close")  # also if it is dead
GUARDED = (*CHANGING, *LOOKING)


class EngineDeadError(RuntimeError):
    """The engine failed in the middle of a step, and its state is unknown. Create a new engine."""


class ForwardError(Exception):
    """A forward failed and was undone: its requests are in the same state as before the step."""

    def __init__(self, requests: Sequence[Request], error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.requests = requests
        self.error = error


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


class HasIsolation(Protocol):
    """What `isolating_failures` uses of a scheduler."""

    isolation: FailureIsolation


class GuardedEngine(Protocol):
    """What the guards use of an engine. `EngineBase` implements it."""

    caller: Caller

    @property
    def scheduler(self) -> HasIsolation: ...
    def settle(self) -> None: ...
    def recover(self, requests: Sequence[Request], error: BaseException) -> Any: ...


def guarded(method: Method) -> Method:
    """Wrap a public method of an engine: check the caller, and hold interrupts back."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: GuardedEngine, *args: Any, **kwargs: Any) -> Any:
        caller, returned = self.caller, None
        caller.check(name)
        if name in CHANGING:
            caller.check_alive()
        if name == "step":
            caller.thread = threading.current_thread()
        try:
            with interrupts_held() as held:
                if caller.depth == 0:
                    self.settle()
                caller.depth += 1
                try:
                    returned = method(self, *args, **kwargs)
                except ForwardError as failure:
                    caller.judge(name, failure.error, held.was_forced, is_undone=True)
                    returned = self.recover(failure.requests, failure.error)
                except BaseException as error:
                    caller.judge(name, error, held.was_forced)
                    raise
                finally:
                    caller.depth -= 1
            return returned
        except BaseException:
            # A signal that was held back is raised here. Python checks for signals when a function
            # is called. This clause calls none, so no other signal can arrive before `undelivered`
            # is set.
            if returned is not None:
                caller.undelivered = (name, returned)
            raise

    return call  # type: ignore[return-value]


def isolating_failures(run: Method) -> Method:
    """Wrap an engine's `run(batch)` so that it reports success or failure.

    If `run` succeeds, `FailureIsolation` is told. If `run` raises an exception, it has already
    undone the batch. The wrapper then raises a `ForwardError`, which the guarded `step` passes to
    `recover`.
    """

    @functools.wraps(run)
    def reported(self: GuardedEngine, batch: Any) -> Any:
        try:
            result = run(self, batch)
        except BaseException as error:
            raise ForwardError(batch.requests, error) from error
        self.scheduler.isolation.passed(batch.requests)
        return result

    return reported  # type: ignore[return-value]
