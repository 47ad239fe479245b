"""`LLMEngine`: what all engines share, around the core that each milestone has.

core               schedules requests, runs the model, and counts tokens: see `engine_core`
input_processor    text -> token ids
output_processor   token ids -> text and stop strings
guard              one thread, no half-done call: see `guard`
search             which request makes forwards fail: see `failure_search`
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from bdb import BdbQuit
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .clock import Clock
from .config import EngineConfig
from .engine_core import EngineCoreOutput, EngineCoreProtocol, ForwardError
from .failure_search import FailureSearch
from .guard import Caller, EngineDeadError, Guard, interrupts_held
from .inputs import Prompt, TokensPrompt
from .offline import OfflineCalls
from .outputs import EngineStats, FinishReason, RequestOutput
from .request import Request
from .sampling.params import SamplingParams
from .text.output_processor import OutputProcessor

if TYPE_CHECKING:
    from typing_extensions import Self

    from .hf.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

# No request is their cause: a broken invariant, code that a student must write, a rank that has
# ended, a debugger that was quit.
BLAMELESS = (AssertionError, NotImplementedError, EngineDeadError, BdbQuit)


class LLMEngine(OfflineCalls):
    """The interface of all engines, and how they handle failures and interrupts.

    One thread makes all calls, and Ctrl-C never stops a step half-way. The `KeyboardInterrupt` is
    raised when the step has ended. If `step` is interrupted, the next `step` returns its outputs.
    If `add_request` is interrupted, there is no new request. If `generate` is interrupted, it ends
    after its current step, and drops its requests. A second Ctrl-C is raised at once, but it makes
    the engine unusable: calls that compute or change requests then raise `EngineDeadError`.
    """

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        """Load `config.model`, or use `loaded`, a model that is already in memory.

        Raises `ValueError` if `config.readable` is set and `loaded` has passes or stored weights.
        """
        from .hf.model_loading import load_model, require_readable  # not above: cores need no model
        from .parallel.served import require_servable
        from .text.input_processor import InputProcessor

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
        self.clock = Clock()
        self.output_processor = OutputProcessor(self.now)
        self.input_processor = InputProcessor(
            self.loaded, self.config, self.output_processor.is_in_use, self.now
        )
        self.core = self.make_core()
        self.search = FailureSearch(self.core, self.config.max_num_batched_tokens)

    @abstractmethod
    def make_core(self) -> EngineCoreProtocol:
        """Return the core of this milestone, for `self.config` and `self.loaded`."""

    def now(self) -> float:
        """Return the time in seconds. All times of requests are of this clock."""
        return self.clock.now()

    def guard(self, name: str) -> Guard:
        """Return the context manager of a public call."""
        return Guard(self.caller, name, self.settle)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id. Raises `ValueError` if it cannot be served (I4).

        A request with n > 1 becomes n requests with ids of their own: see `ParentRequest`.
        """
        with self.guard("add_request") as call:
            return call.keep(self.add(prompt, params, request_id))

    def step(self) -> list[RequestOutput]:
        """Run one iteration; return the outputs of the requests that made progress.

        If there is no work, it does nothing. If the forward raises an `Exception`, the step is
        undone and the exception is logged. Its requests are tried again in halves, down to single
        requests. A request that fails twice alone ends with finish reason `error`.
        """
        with self.guard("step") as call:
            self.search.prepare()
            try:
                results = self.core.step()
            except ForwardError as failure:
                self.process(failure.outputs)
                self.find_cause(failure)
            else:
                self.process(results)
                self.search.passed(results)
            return call.keep(self.output_processor.drain())

    def abort_request(self, request_id: str) -> bool:
        """End a request now, and return True if it was live.

        The next `step` returns its final output.
        """
        with self.guard("abort_request"):
            requests = self.output_processor.find(request_id)
            for request in requests:
                self.finish(request, "abort")
                self.output_processor.abort(request)
            return bool(requests)

    def stats(self) -> EngineStats:
        """Return the counters of the engine."""
        with self.guard("stats"):
            stats = self.core.stats()
            return replace(stats, num_waiting=stats.num_waiting + len(self.search.held))

    def check_invariants(self) -> None:
        """Raise `AssertionError`, naming the invariant, if the engine's state is broken."""
        with self.guard("check_invariants"):
            self.check_requests()
            self.core.check_invariants()

    def reset_prefix_cache(self) -> int:
        """Free the cached pages of requests that have ended. Return the number of freed pages.

        Milestones without a prefix cache have nothing to free.
        """
        with self.guard("reset_prefix_cache"):
            return self.core.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        """Return True until every final output has been returned."""
        with self.guard("has_unfinished_requests"):
            return bool(self.output_processor.requests or self.output_processor.outbox)

    def close(self) -> None:
        """Abort all live requests and refuse new ones. The engine may be closed more than once."""
        with self.guard("close"):
            self.discard(self.output_processor.live_ids())
            self.input_processor.closed = True
            if self.owns_model:
                self.loaded.close()
            self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        **attributes: Any,
    ) -> str:
        """Queue a request, or its children if n > 1. attributes: of each `Request`."""
        if not isinstance(params, SamplingParams) or params.n == 1:
            return self._add_one(prompt, params, request_id, attributes)
        parent = self.input_processor.make_parent(prompt, params, request_id)
        self.output_processor.add_parent(parent)
        shared = TokensPrompt(parent.prompt_token_ids, parent.prompt)
        try:
            for child in parent.children():
                self._add_one(shared, child.params, child.request_id, attributes)
        except BaseException:  # none of the children may stay
            self.discard([parent.request_id])
            raise
        return parent.request_id

    def _add_one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        attributes: dict[str, Any],
    ) -> str:
        request = self.input_processor.make_request(prompt, params, request_id)
        for name, value in attributes.items():
            setattr(request, name, value)
        self.core.add_request(request)
        self.output_processor.add_request(request)
        return request.request_id

    def process(self, results: Iterable[EngineCoreOutput]) -> None:
        """Turn new tokens into text. A stop string may end a request that the core goes on with."""
        for result in results:
            if reason := self.output_processor.process(result):
                self.finish(result.request, reason)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in the core, even if a search keeps it out of the core's queue."""
        self.search.release(request)
        self.core.finish(request, reason)

    def find_cause(self, failure: ForwardError) -> None:
        """Decide how to continue after a forward has failed and has been undone.

        Raises its error again if no request can be the cause.
        """
        error = failure.error
        self.caller.judge("step", error, interrupts_held().was_forced, is_undone=True)
        if not isinstance(error, Exception) or isinstance(error, BLAMELESS):
            self.core.send_back()
            raise error
        requests = [request for request in failure.requests if not request.is_finished]
        logger.warning("a forward failed and is tried again: %s", requests, exc_info=error)
        if (request := self.search.failed(requests)) is not None:
            self.finish(request, "error")
            self.output_processor.fail(request, "its forward failed", error)

    def queued_requests(self) -> list[Request]:
        """Return the requests in all queues."""
        scheduler = self.core.scheduler
        return [*scheduler.waiting, *scheduler.running, *self.search.held]

    def check_requests(self) -> None:
        """Raise `AssertionError` if a request is lost, held twice, or can never move again."""
        queued = self.queued_requests()
        live = self.output_processor.live_requests()
        assert len(queued) == len(live) and set(queued) == set(live), (
            f"I3: each live request must be queued exactly once: queued {queued}, live {live}"
        )
        parents = self.output_processor.parents.values()
        children = {child for parent in parents for child in parent.unfinished}
        assert children <= self.output_processor.requests.keys(), (
            f"I3: a request with n > 1 waits for an output that was returned: live {live}"
        )
        for request in self.core.scheduler.running:
            assert request.num_computed_tokens < request.num_tokens, (
                f"I5: {request} is running, but it has no token to compute"
            )
