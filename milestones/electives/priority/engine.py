"""`EngineCore`: the loop that computes requests, until the last of them finishes.

    step():  launch step N+1    choose the requests, how many tokens of each; queue the forward
             wait for step N    its forward ran in the meantime
             update step N      tokens join their requests; finished requests leave

    host      | launch 2 | wait 1 | update 1, launch 3 | wait 2 | update 2, launch 4 | ...
    forward   | 1 ...............| 2 .........................| 3 ...................

The shell around it (`common/llm_engine.py`) turns tokens into text, and is the same for all
milestones. Upholds I3: what a finished request holds is freed as soon as no step writes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from common import EngineConfig, EngineStats, FinishReason, Prompt, Request, SamplingParams
from common.engine_core import EngineCoreOutput, ForwardError, SampledToken
from common.llm_engine import LLMEngine as Shell
from common.validation import LARGEST_INT, require_int

from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .model_runner import ModelRunner, StepResult


class EngineCore:
    """Owns the scheduler and the model runner."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.runner = runner
        host_pool = runner.host_pool
        self.scheduler = Scheduler(config, runner.kv_pool.num_pages, host_pool.num_pages)
        self.costs = self.scheduler.kv_cache.radix_cache.costs
        self.costs.page_seconds = host_pool.measure()
        self.enable_overlap = config.enable_overlap
        self.result_queue: deque[tuple[ScheduleBatch, StepResult]] = deque()  # oldest first

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        """Return the tokens of one step. The forward of the next step is already queued.

        If a forward fails, all steps in flight are undone, and the requests are as before them.
        """
        if not self.result_queue:
            self.launch()  # first step: no forward is running, so there is nothing to overlap with
        if not self.result_queue:
            return []
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        if self.enable_overlap and not self.scheduler.needs_result():
            self.launch()  # the lesson: launch step N+1 while step N runs
        sampled = self.wait(batch, result)
        self.result_queue.popleft()
        outputs = self.scheduler.update_from_output(batch, sampled)
        self.undo_useless_step()
        return outputs

    def launch(self) -> None:
        """Plan a step and queue its forward behind the step in flight."""
        batch = self.scheduler.schedule()
        # The copies start before this step can write to their pages, even if it is empty.
        with self.undoing_failures(batch):
            self.runner.copy_pages(self.scheduler.kv_cache.radix_cache.take_transfers())
        if batch.requests:
            with self.undoing_failures(batch):
                result = self.runner.launch(batch, self.scheduler.kv_cache.table)
            self.result_queue.append((batch, result))

    def wait(self, batch: ScheduleBatch, result: StepResult) -> list[SampledToken]:
        """Return the tokens of the oldest step. Only here does the host wait for the device."""
        with self.undoing_failures(batch):
            sampled = result.wait()
        if self.runner.stream.spans and not batch.is_decode:
            self.costs.observe(batch.num_tokens, *self.runner.stream.spans[-1])
        return sampled

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
    def undoing_failures(self, batch: ScheduleBatch) -> Iterator[None]:
        """If this part of the batch's forward fails, undo all steps in flight."""
        try:
            yield
        except BaseException as error:
            self.undo_steps_in_flight()
            requests = batch.requests
            if self.runner.end_copies():  # any page may be one that was not written
                self.send_back()
                self.reset_prefix_cache()
                requests = []  # no request is the cause
            raise ForwardError(requests, error) from error

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request that has not ended, and free its memory when no step writes it."""
        if not request.is_finished:
            self.scheduler.finish_request(request, reason)
            self.undo_useless_step()

    def send_back(self) -> None:
        """Let all running requests wait again. They keep their tokens, and lose their memory."""
        self.undo_steps_in_flight()
        for request in self.scheduler.running[::-1]:
            self.scheduler.send_back(request)

    def reset_prefix_cache(self) -> int:
        return self.scheduler.kv_cache.reset_prefix_cache()

    def stats(self) -> EngineStats:
        num_replays = self.runner.graphs.num_replays
        return replace(self.scheduler.make_stats(), num_graph_replays=num_replays)

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()

    def close(self) -> None:
        self.runner.close()


class LLMEngine(Shell):
    """Runs requests until they finish, one `step` at a time."""

    core: EngineCore

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        return EngineCore(self.config, ModelRunner(self.loaded.model, self.config))

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request. priority: a lower value is more urgent."""
        with self.guard("add_request") as call:
            require_int("priority", priority, low=-LARGEST_INT - 1)
            return call.keep(self.add(prompt, params, request_id, priority=priority))
