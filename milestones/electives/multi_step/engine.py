"""`EngineCore`: the loop that computes requests, until the last of them finishes.

    step():  launch a plan      if no step is in flight: choose requests, queue several forwards
             wait for step N    the oldest one
             update step N      tokens join their requests; finished requests leave

    host      | launch 1, 2, 3 | wait 1 | update 1 | wait 2 | update 2 | ... | launch 4, 5, 6 |
    forward             | 1 ............| 2 ..............| 3 ..........|              | 4 ....

The shell around it (`common/llm_engine.py`) turns tokens into text, and is the same for all
milestones. Upholds I3: what a finished request holds is freed as soon as no step writes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, ForwardError, SampledToken
from common.llm_engine import LLMEngine as Shell

from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .model_runner import ModelRunner, StepResult


class EngineCore:
    """Owns the scheduler and the model runner."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(config, runner.kv_pool.num_pages)
        self.result_queue: deque[tuple[ScheduleBatch, StepResult]] = deque()  # oldest first

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        """Return the tokens of one step. The forwards of a whole plan are queued at once.

        If a forward fails, all steps in flight are undone, and the requests are as before them.
        """
        if not self.result_queue:
            self.launch_plan()  # the lesson: decide once per plan, and not once per step
        if not self.result_queue:
            return []
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        sampled = self.wait(batch, result)
        self.result_queue.popleft()
        outputs = self.scheduler.update_from_output(batch, sampled)
        self.undo_useless_step()
        return outputs

    def launch_plan(self) -> None:
        """Plan several steps and queue their forwards, each one behind the one before."""
        self.launch()
        while self.scheduler.goes_on():
            self.launch()
        self.scheduler.in_flight.retreat()

    def launch(self) -> None:
        """Plan a step and queue its forward behind the step in flight."""
        batch = self.scheduler.schedule()
        if batch.requests:
            with self.undoing_failures(batch):
                result = self.runner.launch(batch, self.scheduler.kv_cache.table)
            self.result_queue.append((batch, result))

    def wait(self, batch: ScheduleBatch, result: StepResult) -> list[SampledToken]:
        """Return the tokens of the oldest step. Only here does the host wait for the device."""
        with self.undoing_failures(batch):
            return result.wait()

    def undo_useless_step(self) -> None:
        """If all requests of the steps in flight have finished, undo these steps.

        Their forwards are queued already, so their tokens are computed all the same.
        """
        left = [request for batch, _result in self.result_queue for request in batch.requests]
        if left and all(request.is_finished for request in left):
            self.scheduler.counters.padding_tokens += len(left)
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
            raise ForwardError(batch.requests, error) from error

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
