"""`EngineCore`: the loop of m5, with delayed sampling.

    step():  launch step N+1    choose the requests, how many tokens of each; queue the forward
             wait for step N    its forward ran in the meantime
             update step N      grammars take the tokens; tokens join their requests
             sample step N+1    only if it has masks: they depend on the tokens of step N

    host      | launch 2 | wait 1 | update 1, sample 2, launch 3 | wait 2 | update 2, ...
    forward   | 1 ..............S | 2 ..............    S | 3 ..............

S is the sampling of a step. In m5 it follows its forward at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from common import EngineConfig, Request
from common.engine_core import EngineCoreOutput, ForwardError

from .bitmask import num_words
from .grammar import GrammarLibrary
from .grammar_manager import GrammarCompiler, GrammarManager
from .m5_engine import EngineCore as M5EngineCore
from .m5_engine import LLMEngine as M5LLMEngine
from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .model_runner import ModelRunner

IDLE_WAIT = 0.01  # seconds that a step waits at most if there is nothing to compute
NOT_INSTALLED = "llguidance is not installed; `python -m milestones extras grammar` installs it"


class EngineCore(M5EngineCore):
    """Samples a step with grammars when the tokens of the step before are known."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, grammars: GrammarManager | None = None
    ) -> None:
        super().__init__(config, runner)
        self.scheduler = Scheduler(config, runner.kv_pool.num_pages, grammars)
        self.outputs: list[EngineCoreOutput] = []  # of this step, so far

    def step(self) -> list[EngineCoreOutput]:
        self.outputs = self.admit_compiled()
        self.outputs += super().step()
        self.sample_newest()  # the lesson: now the masks of step N+1 are known
        is_idle = not (self.outputs or self.scheduler.waiting or self.scheduler.running)
        if is_idle and self.scheduler.grammars.queue:
            self.scheduler.grammars.wait(IDLE_WAIT)
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
        super().launch()
        newest = [batch for batch, _result in self.result_queue][-1:]
        if not any(self.scheduler.grammars.awaits_tokens(b.sampled_requests) for b in newest):
            self.sample_newest()

    def sample_newest(self) -> None:
        """Queue the sampling of the newest step in flight, if it waits for masks.

        All tokens before the step must have been accepted by the grammars.
        """
        if self.result_queue and self.result_queue[-1][1].is_delayed:
            batch, result = self.result_queue[-1]
            with self.undoing_failures(batch):
                rows, bits = self.scheduler.grammars.masks(batch.sampled_requests)
                self.runner.sample(result, rows, bits)

    @contextmanager
    def undoing_failures(self, batch: ScheduleBatch) -> Iterator[None]:
        """If this part of the batch's forward fails, undo all steps in flight.

        The outputs that the step has made before are not lost.
        """
        try:
            with super().undoing_failures(batch):
                yield
        except ForwardError as failure:
            failure.outputs = self.take_outputs()
            raise

    def close(self) -> None:
        super().close()
        self.scheduler.grammars.close()


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time. Outputs may follow a grammar."""

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
