"""`EngineBase`: what all engines share: their interface, construction, failures and shutdown."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from bdb import BdbQuit
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from ..config import EngineConfig
from ..hf.loaded import LoadedModel
from ..hf.loader import load_model, require_readable
from ..outputs import EngineStats, RequestOutput
from ..parallel.served import require_servable
from ..prompts import Prompt
from ..request import Request
from ..sampling.params import SamplingParams
from ..text.input_processor import InputProcessor
from ..text.output_processor import OutputProcessor
from .call import GUARDED, Caller, EngineDeadError, guarded
from .failure_isolation import FailureIsolation
from .interrupts import interrupts_held
from .parallel_sampling import WRAPPERS

logger = logging.getLogger(__name__)


class SchedulerProtocol(Protocol):
    """What `EngineBase` uses of the scheduler of a milestone."""

    waiting: deque[Request]
    running: list[Request]
    isolation: FailureIsolation

    def finish_request(self, request: Request) -> None: ...
    def make_stats(self) -> EngineStats: ...
    def check_invariants(self) -> None: ...


class EngineBase(ABC):
    """The interface of all engines, and how they handle failures and interrupts.

    All public calls are `guarded`: one thread makes them, and Ctrl-C never stops a call half-way.
    The `KeyboardInterrupt` is raised at the end of the call, and nothing is lost. If `step` is
    interrupted, the next `step` returns its outputs. If `add_request` is interrupted, there is no
    new request. If `generate` is interrupted, it leaves none of its requests behind. A second
    Ctrl-C is raised at once, but it makes the engine unusable: further calls raise
    `EngineDeadError`.
    """

    scheduler: SchedulerProtocol  # each milestone gives it a more precise type

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in GUARDED:
            if name in vars(cls):
                method = WRAPPERS.get(name, _unchanged)(vars(cls)[name])
                setattr(cls, name, guarded(method))

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        """Load `config.model`, or use `loaded`, a model that is already in memory.

        Raises `ValueError` if `config.readable` is set and `loaded` has passes or stored weights.
        """
        config = config or EngineConfig()
        if config.readable and loaded is not None:
            require_readable(loaded)
        self.caller = Caller()
        self.owns_model = loaded is None
        num_ranks = config.tensor_parallel_size if loaded is None else loaded.num_ranks
        require_servable(type(self), num_ranks)
        self.loaded = loaded or load_model(config)
        self.config = replace(
            config,
            max_model_len=self.loaded.resolve_max_model_len(config),  # from here on a number
            tensor_parallel_size=num_ranks,
        )
        self.output_processor = OutputProcessor(self.loaded.eos_token_ids)
        self.input_processor = InputProcessor(
            self.loaded, self.config, self.output_processor.is_in_use
        )

    @abstractmethod
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id. Raises `ValueError` if it cannot be served (I4).

        A request with n > 1 becomes n requests with ids of their own: see `ParentRequest`.
        """

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """Run one iteration; return the outputs of the requests that made progress.

        If there is no work, it does nothing. If the forward raises an `Exception`, the step is
        undone and the exception is logged. Its requests are tried again in halves, down to single
        requests (see `FailureIsolation`). A request that fails twice alone ends with finish reason
        `error`.
        """

    @abstractmethod
    def abort_request(self, request_id: str) -> bool:
        """End a request now, and return True if it was live.

        The next `step` returns its final output.
        """

    @guarded
    def stats(self) -> EngineStats:
        """Return the counters of the engine."""
        return self.scheduler.make_stats()

    @guarded
    def check_invariants(self) -> None:
        """Raise `AssertionError`, naming the invariant, if the engine's state is broken."""
        self.check_requests()
        self.scheduler.check_invariants()

    @guarded
    def reset_prefix_cache(self) -> int:
        """Free the cached pages of requests that have ended. Return the number of freed pages.

        Milestones without a prefix cache have nothing to free.
        """
        return 0

    @guarded
    def has_unfinished_requests(self) -> bool:
        """Return True until every final output has been returned."""
        return bool(self.output_processor.requests or self.output_processor.outbox)

    @guarded
    def close(self) -> None:
        """Abort all live requests and refuse new ones. The engine may be closed more than once."""
        self.discard(self.output_processor.live_ids())
        self.input_processor.closed = True
        if self.owns_model:
            self.loaded.close()

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
        """Decide how to continue after a forward of `requests` has failed and has been undone.

        Returns the outputs of the step. Raises `error` again if no request can be its cause: an
        interrupt, a broken invariant, a rank that has ended, a debugger that was quit, or a
        `NotImplementedError` of code that a student must write.
        """
        blameless = (AssertionError, NotImplementedError, EngineDeadError, BdbQuit)
        if not isinstance(error, Exception) or isinstance(error, blameless):
            raise error
        logger.warning("a forward failed and is tried again: %s", requests, exc_info=error)
        request = self.scheduler.isolation.failed(requests)
        if request is not None:
            self.scheduler.finish_request(request)
            self.output_processor.fail(request, "its forward failed", error)
        return self.output_processor.drain()

    def queued_requests(self) -> list[Request]:
        """Return the requests in all queues of the scheduler."""
        return [*self.scheduler.waiting, *self.scheduler.running]

    def check_requests(self) -> None:
        """Raise `AssertionError` if a request is lost, held twice, or can never move again."""
        queued = self.queued_requests()
        live = list(self.output_processor.requests.values())
        assert len(queued) == len(live) and set(queued) == set(live), (
            f"I3: each live request must be queued exactly once: queued {queued}, live {live}"
        )
        parents = self.output_processor.parents.values()
        assert {child for parent in parents for child in parent.unfinished} <= {
            request.request_id for request in live
        }, f"I3: a request with n > 1 waits for an output that has ended: live {live}"
        for request in self.scheduler.running:
            assert request.num_computed_tokens < request.num_tokens, (
                f"I5: {request} is running, but it has no token to compute"
            )
        suspects = [r for group in self.scheduler.isolation.groups for r in group]
        assert set(suspects) <= set(live), (
            f"I3: failure isolation holds {suspects}, but only {live} are live"
        )

    def settle(self) -> None:
        """Finish the work that an earlier call left.

        If the call was interrupted, keep or undo its result. If streams were dropped during the
        call, abort their requests.
        """
        caller = self.caller
        if caller.undelivered is not None:
            interrupted, caller.undelivered = caller.undelivered, None
            self.settle_interrupted(*interrupted)
        if caller.abandoned:
            abandoned, caller.abandoned = caller.abandoned, []
            self.discard(abandoned)

    def settle_interrupted(self, name: str, returned: Any) -> None:
        """Keep or undo the result of an interrupted call, which its caller did not receive."""
        if name == "step":
            self.output_processor.put_back(returned)
        elif name == "add_request":
            self.discard([returned])
        elif name == "stream":
            returned.close()

    def abandon(self, request_id: str) -> None:
        """Abort a request after its stream was closed or dropped before the end.

        This happens now if possible. During a call, or in another thread, it is left to the
        beginning of the next call.
        """
        is_other_thread = self.caller.thread not in (None, threading.current_thread())
        if self.caller.depth > 0 or is_other_thread:
            self.caller.abandoned.append(request_id)
        else:
            self.discard([request_id])

    def discard(self, request_ids: Sequence[str]) -> None:
        """Abort those of these requests that are live, and drop the outputs of all of them."""
        with interrupts_held():
            for request_id in request_ids:
                if self.caller.killed_by is None:
                    self.abort_request(request_id)
                self.output_processor.forget(request_id)


def _unchanged(method: Any) -> Any:
    return method
