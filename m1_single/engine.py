"""`LLMEngine`: the life of a request, from `add_request` to its final output.

    step():  batch = schedule()      which requests, how many tokens of each
             result = run(batch)     one forward of the model, one token a request
             process(batch, result)  text, stops, outputs; what has ended is released

Upholds I3 (what ends is released at once), I4 (a bad request is refused before anybody sees it).
"""

from __future__ import annotations

from dataclasses import asdict

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
from common.engine_call import isolating_failures
from common.model_support import require_own_cache
from common.outputs import StepCounters
from common.sampler import SampledToken

from .model_runner import ModelRunner
from .scheduler import ScheduleBatch, Scheduler


class LLMEngine(OfflineEngine):
    """Runs requests to their ends, one `step` at a time."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        *,
        use_cache: bool = True,
    ) -> None:
        """`use_cache=False` computes all tokens anew in each step: what the KV cache saves."""
        super().__init__(config, loaded)
        assert self.config.max_model_len is not None
        require_own_cache(self.loaded.model, self.config.max_model_len)
        self.scheduler = Scheduler()
        self.runner = ModelRunner(self.loaded.model, use_cache)
        self.counters = StepCounters()

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
        """One forward. If it fails, the request starts anew, and may go on."""
        try:
            return list(self.runner.run(batch).rows())
        except BaseException:
            self.runner.forget(batch.requests)
            raise

    def process(self, batch: ScheduleBatch, result: list[SampledToken]) -> list[RequestOutput]:
        """Hand each request its token; release those that end with it."""
        self.counters.num_steps += bool(batch.requests)
        for request, num_tokens in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            of_prompt = max(0, request.num_prompt_tokens - request.num_computed_tokens)
            self.counters.prefill_tokens += min(num_tokens, of_prompt)
            self.counters.decode_tokens += max(0, num_tokens - of_prompt)
            if self.runner.use_cache:
                request.num_computed_tokens += num_tokens
        for request, (token_id, logprobs) in zip(batch.requests, result, strict=True):
            if self.output_processor.append_token(request, token_id, logprobs):
                self.release(request)
        return self.output_processor.drain()

    def abort_request(self, request_id: str) -> bool:
        request = self.output_processor.find(request_id)
        if request is None:
            return False
        self.release(request)
        self.output_processor.abort(request)
        return True

    def release(self, request: Request) -> None:
        """I3: give back all that a request holds, whether it waits or runs."""
        self.scheduler.remove_request(request)
        self.runner.forget([request])

    def stats(self) -> EngineStats:
        cached = sum(request.num_computed_tokens for request in self.scheduler.running)
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            kv_tokens_reserved=cached,
            kv_tokens_used=cached,
            **asdict(self.counters),
        )

    def check_invariants(self) -> None:
        self.check_requests()
        self.scheduler.check_invariants()
        self.runner.check_invariants(self.scheduler.running)
