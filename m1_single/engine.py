"""`LLMEngine`: the life of a request, from `add_request` to its final output.

    step():  batch = schedule()      choose the requests, and how many tokens of each
             result = run(batch)     one forward of the model, one sampled token per request
             process(batch, result)  text, stop conditions, outputs; finished requests leave

Upholds I3 (a finished request is freed at once) and I4 (a bad request is refused before the
scheduler sees it).
"""

from __future__ import annotations

from common import (
    EngineConfig,
    LoadedModel,
    OfflineEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
)
from common.engine.call import isolating_failures
from common.hf.support import require_own_cache
from common.sampling.sampler import SampledToken

from .model_runner import ModelRunner
from .schedule_batch import ScheduleBatch
from .scheduler import Scheduler


class LLMEngine(OfflineEngine):
    """Runs requests until they finish, one `step` at a time."""

    scheduler: Scheduler

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        *,
        use_cache: bool = True,
    ) -> None:
        """`use_cache=False`: compute all tokens again in each step. It shows what a cache saves."""
        super().__init__(config, loaded)
        assert self.config.max_model_len is not None
        require_own_cache(self.loaded.model, self.config.max_model_len)
        self.scheduler = Scheduler(use_cache=use_cache)
        self.runner = ModelRunner(self.loaded.model, use_cache)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        request = self.input_processor.make_request(prompt, params, request_id)
        self.scheduler.add_request(request)
        self.output_processor.add_request(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        batch = self.scheduler.schedule()
        result = self.run(batch)
        return self.process(batch, result)

    @isolating_failures
    def run(self, batch: ScheduleBatch) -> list[SampledToken]:
        """Run one forward. If it fails, the request keeps its tokens and starts again."""
        try:
            return list(self.runner.run(batch).rows())
        except BaseException:
            self.runner.free(batch.requests)
            raise

    def process(self, batch: ScheduleBatch, result: list[SampledToken]) -> list[RequestOutput]:
        """Append the sampled tokens, and free the requests that finish with them."""
        self.scheduler.update_after_step(batch)
        for request, (token_id, logprobs) in zip(batch.requests, result, strict=True):
            if self.output_processor.append_token(request, token_id, logprobs):
                self.scheduler.finish_request(request)
                self.runner.free([request])
        return self.output_processor.drain()

    def abort_request(self, request_id: str) -> bool:
        request = self.output_processor.find(request_id)
        if request is None:
            return False
        self.scheduler.finish_request(request)
        self.runner.free([request])
        self.output_processor.abort(request)
        return True

    def check_invariants(self) -> None:
        super().check_invariants()
        self.runner.check_invariants(self.scheduler.running)
