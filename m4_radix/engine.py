"""`EngineCore`: the loop that computes requests, until the last of them finishes.

    step():  batch = schedule()         choose the requests, and how many tokens of each
             sampled = run(batch)       one forward of the model, one sampled token per request
             update_from_output(...)    tokens join their requests; finished requests leave

The shell around it (`common/llm_engine.py`) turns tokens into text, and is the same for all
milestones. Upholds I3: what a finished request holds is freed at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, ForwardError
from common.llm_engine import LLMEngine as Shell

from .scheduler import Scheduler

if TYPE_CHECKING:
    from .model_runner import ModelRunner


class EngineCore:
    """Owns the scheduler and the model runner."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(config, runner.kv_pool.num_pages)

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        """Run one iteration. If the forward fails, the requests are as before the step."""
        batch = self.scheduler.schedule()
        try:
            sampled = list(self.runner.run(batch, self.scheduler.kv_cache.table).rows())
        except BaseException as error:
            self.scheduler.undo(batch)
            raise ForwardError(batch.requests, error) from error
        return self.scheduler.update_from_output(batch, sampled)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request that has not ended, and free its memory."""
        if not request.is_finished:
            self.scheduler.finish_request(request, reason)

    def send_back(self) -> None:
        """Let all running requests wait again. They keep their tokens, and lose their memory."""
        for request in self.scheduler.running[::-1]:
            self.scheduler.send_back(request)

    def reset_prefix_cache(self) -> int:
        return self.scheduler.kv_cache.reset_prefix_cache()

    def stats(self) -> EngineStats:
        return self.scheduler.make_stats()

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()

    def close(self) -> None:
        self.runner.kv_pool.release()


class LLMEngine(Shell):
    """Runs requests until they finish, one `step` at a time."""

    core: EngineCore

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        return EngineCore(self.config, ModelRunner(self.loaded.model, self.config))
