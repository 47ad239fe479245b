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
from itertools import islice

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

from .drafter import Drafter, NGramDrafter
from .model_runner import ModelRunner, StepResult
from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler


class LLMEngine(OfflineEngine):
    """Runs requests until they finish, one `step` at a time."""

    scheduler: Scheduler

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """drafter: guesses tokens; by default prompt lookup."""
        super().__init__(config, loaded)
        self.runner = ModelRunner(self.loaded.model, self.config)
        num_pages = self.runner.kv_pool.num_pages
        self.scheduler = Scheduler(self.config, num_pages, drafter or NGramDrafter())
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
        return tokens

    def process(self, batch: ScheduleBatch, result: list[SampledToken]) -> list[RequestOutput]:
        """Append the sampled tokens, and free the requests that finish with them.

        The token of a request that has finished since the launch is dropped.
        """
        self.result_queue.popleft()
        self.scheduler.update_after_step(batch)
        sampled = iter(result)
        for request in batch.sampled_requests:
            drafts = batch.drafts.get(request, [])
            self.verify(request, drafts, list(islice(sampled, 1 + len(drafts))))
        self.scheduler.free_refused(batch)
        self.undo_useless_step()
        return self.output_processor.drain()

    def verify(self, request: Request, drafts: list[int], sampled: list[SampledToken]) -> None:
        """Append the model's own tokens, up to the first one that differs from its draft.

        I1, I2: `sampled[i]` is what the model draws behind the first i drafts. If these are its own
        tokens, it is the token that a step without drafts would draw at this position.
        """
        for number, (token_id, logprobs) in enumerate(sampled):
            if request.is_finished or (number > 0 and request.token_ids[-1] != drafts[number - 1]):
                return
            if number > 0:
                self.scheduler.accept(request)
            if self.output_processor.append_token(request, token_id, logprobs):
                self.scheduler.finish_request(request)

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
        return replace(
            super().stats(),
            num_graph_replays=self.runner.graphs.num_replays,
            num_draft_tokens=self.scheduler.drafting.num_draft_tokens,
            num_accepted_tokens=self.scheduler.drafting.num_accepted_tokens,
        )

    def close(self) -> None:
        super().close()
        self.runner.close()
