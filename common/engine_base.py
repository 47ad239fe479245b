"""`EngineBase`: what all engines share, whatever they schedule: construction, failures, the end."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from .config import EngineConfig
from .engine_call import GUARDED, Caller, guarded
from .failure_isolation import FailureIsolation
from .input_processor import InputProcessor, Prompt
from .interrupts import interrupts_held
from .model_loader import LoadedModel, load_model
from .output_processor import OutputProcessor
from .outputs import EngineStats, RequestOutput
from .request import Request
from .sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class SchedulerProtocol(Protocol):
    """What `EngineBase` uses of an engine's scheduler."""

    waiting: deque[Request]
    running: list[Request]
    isolation: FailureIsolation


class EngineBase(ABC):
    """The interface of all engines, and what becomes of failures and interrupts.

    All public calls are `guarded`: one thread makes them, and Ctrl-C never stops one half-way. It
    is raised at the end of the call, and nothing is lost by it. If `step` is interrupted, the next
    `step` returns its outputs. If `add_request` is interrupted, there is no new request. If
    `generate` is interrupted, it leaves none of its requests behind. A second Ctrl-C is raised at
    once, but ends the engine: further calls raise `EngineDeadError`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in GUARDED:
            if name in vars(cls):
                setattr(cls, name, guarded(vars(cls)[name]))

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        """Load `config.model`, or share a model that is loaded already."""
        config = config or EngineConfig()
        self.caller = Caller()
        self.loaded = loaded or load_model(config)
        # From here on every limit is a number.
        self.config = replace(config, max_model_len=self.loaded.resolve_max_model_len(config))
        self.output_processor = OutputProcessor(self.loaded.eos_token_ids)
        self.input_processor = InputProcessor(
            self.loaded, self.config, self.output_processor.in_flight
        )

    @property
    def queues(self) -> SchedulerProtocol:
        """The engine's own scheduler, which each milestone types more closely."""
        return self.scheduler  # type: ignore[attr-defined]

    @abstractmethod
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id. Raises `ValueError` if it cannot be served (I4)."""

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """Run one iteration; return the outputs of the requests that moved.

        Without work it does nothing. If the forward raises an `Exception`, the step is undone and
        the exception is logged. Its requests are tried again in halves, down to single requests
        (see `FailureIsolation`). A request that fails twice alone ends with finish reason `error`.
        """

    @abstractmethod
    def abort_request(self, request_id: str) -> bool:
        """End a request now; True if it was live. Its final output comes from the next `step`."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Give back all that a request holds (I3)."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The engine's counters."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise `AssertionError`, naming the invariant, if the engine's state is broken."""

    @guarded
    def reset_prefix_cache(self) -> int:
        """Forget what is kept of requests that have ended; how many pages are free by that. Most
        rungs keep nothing."""
        return 0

    @guarded
    def has_unfinished_requests(self) -> bool:
        """True until every final output has been returned."""
        return bool(self.output_processor.requests or self.output_processor.outbox)

    @guarded
    def close(self) -> None:
        """Abort what is left and refuse what comes. Closing twice is fine."""
        self.forget(list(self.output_processor.requests))
        self.input_processor.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def recover(self, requests: Sequence[Request], error: BaseException) -> list[RequestOutput]:
        """Decide how to go on after a forward of `requests` has failed and has been undone.

        Returns the outputs of the step. Raises `error` again if no request can be the cause: an
        interrupt, a broken invariant, or code that is still to be written.
        """
        blameless = (AssertionError, NotImplementedError)
        if not isinstance(error, Exception) or isinstance(error, blameless):
            raise error
        logger.warning("a forward failed and is tried again: %s", requests, exc_info=error)
        request = self.queues.isolation.failed(requests)
        if request is not None:
            self.release(request)
            self.output_processor.fail(request, "its forward failed", error)
        return self.output_processor.drain()

    def check_requests(self) -> None:
        """Raise `AssertionError` if a request is lost, held twice, or can never move again."""
        queued = [*self.queues.waiting, *self.queues.running]
        live = list(self.output_processor.requests.values())
        assert len(queued) == len(live) and set(queued) == set(live), (
            f"I3: every live request waits or runs, once: {queued} are queued, {live} are live"
        )
        for request in self.queues.running:
            assert request.num_computed_tokens < request.num_tokens, (
                f"I5: {request} runs and has nothing to compute"
            )
        suspects = [r for group in self.queues.isolation.groups for r in group]
        assert set(suspects) <= set(live), f"I3: {suspects} are to be tried, {live} are live"

    def settle(self) -> None:
        """Do what could not be done when a call was interrupted, or a stream was dropped in one."""
        caller = self.caller
        if caller.undelivered is not None:
            interrupted, caller.undelivered = caller.undelivered, None
            self.take_back(*interrupted)
        if caller.abandoned:
            abandoned, caller.abandoned = caller.abandoned, []
            self.forget(abandoned)

    def take_back(self, name: str, returned: Any) -> None:
        """Keep or undo what an interrupted call was about to return."""
        if name == "step":
            self.output_processor.put_back(returned)
        elif name == "add_request":
            self.forget([returned])
        elif name == "stream":
            returned.close()

    def abandon(self, request_id: str) -> None:
        """Abort a request with a stream that has ended early: now, or when the next call begins."""
        is_other_thread = self.caller.thread not in (None, threading.current_thread())
        if self.caller.depth > 0 or is_other_thread:
            self.caller.abandoned.append(request_id)
        else:
            self.forget([request_id])

    def forget(self, request_ids: Sequence[str]) -> None:
        """Abort these requests where they live, and drop their outputs."""
        with interrupts_held():
            for request_id in request_ids:
                if self.caller.killed_by is None:
                    self.abort_request(request_id)
                self.output_processor.requests.pop(request_id, None)  # of a dead engine
                self.output_processor.outbox.pop(request_id, None)
