"""`EngineCore`: the loop that computes requests, until the last of them finishes.

    step():  launch step N+1    choose the requests, how many tokens of each; queue the forward
             wait for step N    its forward ran in the meantime
             update step N      grammars take the tokens; tokens join their requests
             sample step N+1    only if it has masks: they depend on the tokens of step N

    host      | launch 2 | wait 1 | update 1, sample 2, launch 3 | wait 2 | update 2, ...
    forward   | 1 ..............S | 2 ..............    S | 3 ..............

The shell around it (`common/llm_engine.py`) turns tokens into text, and is the same for all
milestones. Upholds I3: what a finished request holds is freed as soon as no step writes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, ForwardError, SampledToken
from common.llm_engine import LLMEngine as Shell

from .bitmask import num_words
from .grammar import GrammarLibrary
from .grammar_manager import GrammarCompiler, GrammarManager
from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .model_runner import ModelRunner, StepResult

IDLE_WAIT = 0.01  # seconds that a step waits at most if there is nothing to compute
NOT_INSTALLED = "llguidance is not installed; `python -m milestones extras grammar` installs it"


class EngineCore:
    """Owns the scheduler and the model runner."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, grammars: GrammarManager | None = None
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(config, runner.kv_pool.num_pages, grammars)
        self.outputs: list[EngineCoreOutput] = []  # of this step, so far
        self.enable_overlap = config.enable_overlap
        self.result_queue: deque[tuple[ScheduleBatch, StepResult]] = deque()  # oldest first

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        """Return the tokens of one step. The forward of the next step is already queued.

        If a forward fails, all steps in flight are undone, and the requests are as before them.
        """
        self.outputs = self.admit_compiled()
        if not self.result_queue:
            self.launch()  # first step: no forward is running, so there is nothing to overlap with
        if not self.result_queue:
            if self.scheduler.grammars.queue and not self.outputs:
                self.scheduler.grammars.wait(IDLE_WAIT)
            return self.take_outputs()
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        if self.enable_overlap and not self.scheduler.needs_result():
            self.launch()  # the lesson: launch step N+1 while step N runs
        sampled = self.wait(batch, result)
        self.result_queue.popleft()
        self.outputs += self.scheduler.update_from_output(batch, sampled)
        self.undo_useless_step()
        self.sample_newest()  # the lesson: now the masks of step N+1 are known
        return self.take_outputs()

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return the outputs of this step so far, and keep none of them (I3)."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def admit_compiled(self) -> list[EngineCoreOutput]:
        """Let requests with a compiled grammar wait to run. Return those that end: a bad one."""
        outputs = []
        for request, error in self.scheduler.grammars.take_compiled():
            if error is None:
                self.scheduler.enqueue(request)
            else:
                request.finish_reason = "error"
                outputs.append(EngineCoreOutput(request, finish_reason="error", error=error))
        return outputs

    def launch(self) -> None:
        """Plan a step and queue its forward behind the step in flight.

        If the step has grammars, its sampling is queued as soon as the masks are known.
        """
        batch = self.scheduler.schedule()
        if batch.requests:
            with self.undoing_failures(batch):
                result = self.runner.launch(batch, self.scheduler.kv_cache.table)
            self.result_queue.append((batch, result))
            if not self.scheduler.grammars.awaits_tokens(batch.sampled_requests):
                self.sample_newest()

    def wait(self, batch: ScheduleBatch, result: StepResult) -> list[SampledToken]:
        """Return the tokens of the oldest step. Only here does the host wait for the device."""
        with self.undoing_failures(batch):
            return result.wait()

    def sample_newest(self) -> None:
        """Queue the sampling of the newest step in flight, if it waits for masks.

        All tokens before the step must have been accepted by the grammars.
        """
        if self.result_queue and self.result_queue[-1][1].is_delayed:
            batch, result = self.result_queue[-1]
            with self.undoing_failures(batch):
                rows, bits = self.scheduler.grammars.masks(batch.sampled_requests)
                self.runner.sample(result, rows, bits)

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
            raise ForwardError(batch.requests, error, self.take_outputs()) from error

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
        self.scheduler.grammars.close()


class LLMEngine(Shell):
    """Runs requests until they finish, one `step` at a time."""

    core: EngineCore

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        compiler = GrammarCompiler(GrammarLibrary(self.loaded))
        grammars = GrammarManager(compiler, num_words(self.loaded.vocab_size))
        self.input_processor.no_structured_outputs = (
            None if find_spec("llguidance") else NOT_INSTALLED
        )
        return EngineCore(self.config, ModelRunner(self.loaded.model, self.config), grammars)

    def queued_requests(self) -> list[Request]:
        return [*self.core.scheduler.grammars.queue, *super().queued_requests()]
