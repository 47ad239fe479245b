"""`EngineCore`: the loop that computes requests, until the last of them finishes.

    step():  batch = schedule()         choose the request, and how many of its tokens
             sampled = run(batch)       one forward of the model, one sampled token
             update_from_output(...)    the token joins its request; a finished request leaves

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
    from common import LoadedModel

    from .model_runner import ModelRunner


class EngineCore:
    """Owns the scheduler and the model runner."""

    def __init__(self, runner: ModelRunner, *, use_cache: bool = True) -> None:
        self.runner = runner
        self.scheduler = Scheduler(use_cache=use_cache)

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        """Run one iteration. If the forward fails, its request keeps its tokens and waits again."""
        batch = self.scheduler.schedule()
        try:
            sampled = list(self.runner.run(batch).rows())
        except BaseException as error:
            self.send_back()
            raise ForwardError(batch.requests, error) from error
        outputs = self.scheduler.update_from_output(batch, sampled)
        self.runner.free(request for request in batch.requests if request.is_finished)
        return outputs

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request that has not ended, and drop its keys and values."""
        if not request.is_finished:
            self.scheduler.finish_request(request, reason)
            self.runner.free([request])

    def send_back(self) -> None:
        """Let the running request wait again. It keeps its tokens, and starts again."""
        for request in list(self.scheduler.running):
            self.runner.free([request])
            self.scheduler.send_back(request)

    def reset_prefix_cache(self) -> int:
        return 0  # there is no prefix cache

    def stats(self) -> EngineStats:
        return self.scheduler.make_stats()

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        self.runner.check_invariants(self.scheduler.running)

    def close(self) -> None: ...


class LLMEngine(Shell):
    """Runs requests until they finish, one `step` at a time."""

    core: EngineCore

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        *,
        use_cache: bool = True,
    ) -> None:
        """`use_cache=False`: compute all tokens again in each step. It shows what a cache saves."""
        self.use_cache = use_cache
        super().__init__(config, loaded)

    def make_core(self) -> EngineCore:
        from common.hf.support import require_own_cache

        from .model_runner import ModelRunner

        assert self.config.max_model_len is not None
        require_own_cache(self.loaded.model, self.config.max_model_len)
        runner = ModelRunner(self.loaded.model, self.use_cache)
        return EngineCore(runner, use_cache=self.use_cache)
