"""`LLMEngine`: the life of a request, from `add_request` to its final output.

    step():  launch step N+1    choose the requests, how many tokens of each; queue the forward
             wait for step N    its forward ran in the meantime
             process step N     grammars take the tokens; text, stop conditions, outputs
             sample step N+1    only if it has masks: they depend on the tokens of step N

    host      | launch 2 | wait 1 | process 1, sample 2, launch 3 | wait 2 | process 2, ...
    forward   | 1 ..............S | 2 ...............    S | 3 ..............

Upholds I3 (a finished request is freed as soon as no step writes it) and I4 (a bad request is
refused before the scheduler sees it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

from common.guard import ForwardError

from common import (
    EngineConfig,
    EngineStats,
    LoadedModel,
    OfflineEngine,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
)
from common.sampling.sampler import SampledToken

from .bitmask import num_words
from .grammar import GrammarLibrary
from .grammar_manager import GrammarCompiler, GrammarManager
from .model_runner import ModelRunner, StepResult
from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler

IDLE_WAIT = 0.01  # seconds that a step waits at most if there is nothing to compute
NOT_INSTALLED = "llguidance is not installed; `python -m milestones extras grammar` installs it"


class LLMEngine(OfflineEngine):
    """Runs requests until they finish, one `step` at a time."""

    scheduler: Scheduler

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        super().__init__(config, loaded)
        self.runner = ModelRunner(self.loaded.model, self.config)
        self.compiler = GrammarCompiler(GrammarLibrary(self.loaded))
        grammars = GrammarManager(self.compiler, num_words(self.loaded.vocab_size))
        self.scheduler = Scheduler(self.config, self.runner.kv_pool.num_pages, grammars)
        self.input_processor.no_structured_outputs = (
            None if find_spec("llguidance") else NOT_INSTALLED
        )
        self.result_queue: deque[tuple[ScheduleBatch, StepResult]] = deque()  # oldest first

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        request = self.input_processor.make_request(prompt, params, request_id)
        self.scheduler.add_request(request)
        self.output_processor.add_request(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Return the outputs of one step. The forward of the next step is already queued."""
        self.admit_compiled()
        if not self.result_queue:
            self.launch()  # first step: no forward is running, so there is nothing to overlap with
        if not self.result_queue:
            if self.scheduler.grammars.queue and not self.output_processor.outbox:
                self.scheduler.grammars.wait(IDLE_WAIT)
            return self.output_processor.drain()
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        if self.config.enable_overlap and not self.scheduler.needs_result():
            self.launch()  # the lesson: launch step N+1 while step N runs
        return self.process(batch, self.wait(result))

    def admit_compiled(self) -> None:
        """Move requests with a compiled grammar to the waiting queue. End those with a bad one."""
        for request, error in self.scheduler.grammars.take_compiled():
            if error is None:
                self.scheduler.enqueue(request)
            else:
                self.output_processor.fail(request, error)

    def launch(self) -> None:
        """Plan a step and queue its forward behind the step in flight.

        If the step has grammars, its sampling is queued as soon as the masks are known.
        """
        batch = self.scheduler.schedule()
        if batch.requests:
            with self._undoing_failures(batch):
                result = self.runner.launch(batch, self.scheduler.kv_cache.table)
            self.result_queue.append((batch, result))
            if not self.scheduler.awaits_tokens(batch):
                self.sample_newest()
        else:
            self.scheduler.isolation.passed([])

    def wait(self, result: StepResult) -> list[SampledToken]:
        """Return the tokens of the oldest step. Only here does the host wait for the device."""
        batch, _result = self.result_queue[0]
        with self._undoing_failures(batch):
            tokens = result.wait()
        self.scheduler.isolation.passed(batch.requests)
        return tokens

    def process(self, batch: ScheduleBatch, result: list[SampledToken]) -> list[RequestOutput]:
        """Append the sampled tokens, and free the requests that finish with them.

        The token of a request that has finished since the launch is dropped. A token that the
        grammar of its request does not allow ends the request with an error.
        """
        self.result_queue.popleft()
        self.scheduler.update_after_step(batch)
        for request, (token_id, logprobs) in zip(batch.sampled_requests, result, strict=True):
            if request.is_finished:
                continue
            if error := self.scheduler.grammars.accept(request, token_id):
                self.output_processor.fail(request, error)
                self.scheduler.finish_request(request)
            elif self.output_processor.append_token(request, token_id, logprobs):
                self.scheduler.finish_request(request)
        self.undo_useless_step()
        self.sample_newest()  # the lesson: now the masks of step N+1 are known
        return self.output_processor.drain()

    def sample_newest(self) -> None:
        """Queue the sampling of the newest step in flight, if it waits for masks.

        All tokens before the step must have been accepted by the grammars.
        """
        if self.result_queue and self.result_queue[-1][1].is_delayed:
            batch, result = self.result_queue[-1]
            with self._undoing_failures(batch):
                rows, bits = self.scheduler.grammars.masks(batch.sampled_requests)
                self.runner.sample(result, rows, bits)

    def queued_requests(self) -> list[Request]:
        return [*self.scheduler.grammars.queue, *super().queued_requests()]

    def undo_useless_step(self) -> None:
        """If all requests of the newest step in flight have finished, undo it."""
        if self.result_queue and all(r.is_finished for r in self.result_queue[-1][0].requests):
            self.undo_steps_in_flight()

    def undo_steps_in_flight(self) -> None:
        """Undo all steps in flight. Their requests are as before, and can go on."""
        self.runner.synchronize()
        self.result_queue.clear()
        while batches := self.scheduler.in_flight.batches:
            self.scheduler.undo(batches[-1])

    @contextmanager
    def _undoing_failures(self, batch: ScheduleBatch) -> Iterator[None]:
        """If this part of the batch's forward fails, undo all steps in flight.

        A request of the batch that has finished since its launch is not tried again.
        """
        try:
            yield
        except BaseException as error:
            self.undo_steps_in_flight()
            live = [request for request in batch.requests if not request.is_finished]
            raise ForwardError(live, error) from error

    def abort_request(self, request_id: str) -> bool:
        request = self.output_processor.find(request_id)
        if request is None:
            return False
        self.scheduler.finish_request(request)
        self.output_processor.abort(request)
        self.undo_useless_step()
        return True

    def reset_prefix_cache(self) -> int:
        return self.scheduler.kv_cache.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return replace(super().stats(), num_graph_replays=self.runner.graphs.num_replays)

    def close(self) -> None:
        super().close()
        self.runner.close()
        self.compiler.close()
