"""`guarded`: what holds for every public call of an engine, whatever the call does.

- One thread, one process. An engine has no locks: a call of a second thread would see, or leave, a
  half-done step. It is refused, and so is a call after `fork`, where the forward thread is missing.
- An interrupt (Ctrl-C, the handler of a timer) never stops a call half-way: see `interrupts`. What
  the interrupted call would have returned is not lost: the next call begins by taking it back.
- The garbage collector may drop a stream in the middle of a step, or in another thread. Its request
  is then aborted at the beginning of the next call.
- After an exception in the middle of a step the state is unknown, and no answer can be trusted: the
  engine refuses all further calls with `EngineDeadError`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .interrupts import interrupts_held

if TYPE_CHECKING:
    from .engine_base import EngineBase
    from .request import Request

Method = TypeVar("Method", bound=Callable[..., Any])

CHANGING = ("add_request", "step", "abort_request", "reset_prefix_cache", "generate", "stream")
LOOKING = ("stats", "check_invariants", "has_unfinished_requests", "close")  # on a dead engine too
GUARDED = (*CHANGING, *LOOKING)


class EngineDeadError(RuntimeError):
    """The engine failed in the middle of a step, and its state is unknown. Make a new one."""


class ForwardError(Exception):
    """A forward failed, and has been undone: its requests are as before the step."""

    def __init__(self, requests: Sequence[Request], error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.requests = requests
        self.error = error


class Caller:
    """The process and the thread that may call an engine; and the exception that ended it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.thread: threading.Thread | None = None  # the one that stepped last
        self.killed_by: BaseException | None = None
        self.depth = 0  # calls in progress, one inside the other
        self.undelivered: tuple[str, Any] | None = None  # an interrupted call, what it returned
        self.abandoned: list[str] = []  # requests of streams that were dropped during a call

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
                "engine. One thread makes all calls; hand it requests through a queue."
            )

    def judge(
        self, name: str, error: BaseException, was_forced: bool, is_undone: bool = False
    ) -> None:
        """Decide whether an exception has left the engine half-changed.

        A forward that was undone leaves it whole, unless an invariant was broken, or a second
        Ctrl-C may have hit the undoing as well. The innermost call decides.
        """
        if "is_judged" in vars(error):
            return
        vars(error)["is_judged"] = True
        changes = name in ("step", "abort_request")
        if was_forced or (changes and (not is_undone or isinstance(error, AssertionError))):
            self.killed_by = error

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine failed in the middle of a step."""
        if self.killed_by is not None:
            raise EngineDeadError(
                "the engine failed in the middle of a step, and its state is unknown: make a new "
                f"one ({type(self.killed_by).__name__}: {self.killed_by})"
            ) from self.killed_by


def guarded(method: Method) -> Method:
    """Return a public method of an engine with the checks, and with interrupts held back."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: EngineBase, *args: Any, **kwargs: Any) -> Any:
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
            # A signal that was held back. Python looks for signals when a function is called: this
            # clause calls none, so another signal cannot come before the next line has run.
            if returned is not None:
                caller.undelivered = (name, returned)
            raise

    return call  # type: ignore[return-value]


def isolating_failures(run: Method) -> Method:
    """Return an engine's `run(batch)` that also tells `FailureIsolation` whether it failed.

    When `run` raises, it has undone the batch. The exception goes on as a `ForwardError`, which the
    guarded `step` hands to `recover`.
    """

    @functools.wraps(run)
    def reported(self: EngineBase, batch: Any) -> Any:
        try:
            result = run(self, batch)
        except BaseException as error:
            raise ForwardError(batch.requests, error) from error
        self.queues.isolation.passed(batch.requests)
        return result

    return reported  # type: ignore[return-value]
