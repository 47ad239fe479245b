"""`LLMEngine`: the life of a request, from `add_request` to its final output.

    step():  launch step N+1    choose the requests, how many tokens of each; queue the forward
             wait for step N    its forward ran in the meantime
             process step N     text, stop conditions, outputs; N+1 runs while this happens

    host      | launch 2 | wait 1 | process 1, launch 3 | wait 2 | process 2, launch 4 | ...
    forward   | 1 ................| 2 ...........................| 3 ...................

Upholds I3 (a finished request is freed as soon as no step writes it) and I4 (a bad request is
refused before the scheduler sees it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from common.guard import ForwardError

from common import (
    EngineConfig,
    EngineStats,
    LoadedModel,
    OfflineEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
)
from common.sampling.sampler import SampledToken
from common.validation import LARGEST_INT, require_int

from .model_runner import ModelRunner, StepResult
from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler


class LLMEngine(OfflineEngine):
    """Runs requests until they finish, one `step` at a time."""

    scheduler: Scheduler

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        super().__init__(config, loaded)
        self.runner = ModelRunner(self.loaded.model, self.config)
        host_pool = self.runner.host_pool
        self.scheduler = Scheduler(self.config, self.runner.kv_pool.num_pages, host_pool.num_pages)
        self.costs = self.scheduler.kv_cache.radix_cache.costs
        self.costs.page_seconds = host_pool.measure()
        self.result_queue: deque[tuple[ScheduleBatch, StepResult]] = deque()  # oldest first

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request. priority: a lower value is more urgent."""
        require_int("priority", priority, low=-LARGEST_INT - 1)
        request = self.input_processor.make_request(prompt, params, request_id)
        request.priority = priority
        self.scheduler.add_request(request)
        self.output_processor.add_request(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Return the outputs of one step. The forward of the next step is already queued."""
        if not self.result_queue:
            self.launch()  # first step: no forward is running, so there is nothing to overlap with
        if not self.result_queue:
            return self.output_processor.drain()
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        if self.config.enable_overlap and not self.scheduler.needs_result():
            self.launch()  # the lesson: launch step N+1 while step N runs
        return self.process(batch, self.wait(result))

    def launch(self) -> None:
        """Plan a step and queue its forward behind the step in flight."""
        batch = self.scheduler.schedule()
        # The copies start before this step can write to their pages, even if it is empty.
        with self._undoing_failures(batch):
            self.runner.copy_pages(self.scheduler.kv_cache.radix_cache.take_transfers())
        if batch.requests:
            with self._undoing_failures(batch):
                result = self.runner.launch(batch, self.scheduler.kv_cache.table)
            self.result_queue.append((batch, result))
        else:
            self.scheduler.isolation.passed([])

    def wait(self, result: StepResult) -> list[SampledToken]:
        """Return the tokens of the oldest step. Only here does the host wait for the device."""
        batch, _result = self.result_queue[0]
        with self._undoing_failures(batch):
            tokens = result.wait()
        self.scheduler.isolation.passed(batch.requests)
        if self.runner.stream.spans and not batch.is_decode:
            self.costs.observe(batch.num_tokens, *self.runner.stream.spans[-1])
        return tokens

    def process(self, batch: ScheduleBatch, result: list[SampledToken]) -> list[RequestOutput]:
        """Append the sampled tokens, and free the requests that finish with them.

        The token of a request that has finished since the launch is dropped.
        """
        self.result_queue.popleft()
        self.scheduler.update_after_step(batch)
        for request, (token_id, logprobs) in zip(batch.sampled_requests, result, strict=True):
            if request.is_finished:
                continue
            if self.output_processor.append_token(request, token_id, logprobs):
                self.scheduler.finish_request(request)
        self.undo_useless_step()
        return self.output_processor.drain()

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
            if self.runner.end_copies():  # any page may be one that was not written
                self.scheduler.drop_pages()
                live = []  # no request is the cause
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
