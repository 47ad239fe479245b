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
from common.outputs import StepCounters
from common.sampler import SampledToken

from .model_runner import ModelRunner
from .scheduler import ScheduleBatch, Scheduler


class LLMEngine(OfflineEngine):
    """Runs requests to their ends, one `step` at a time."""

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        super().__init__(config, loaded)
        self.runner = ModelRunner(self.loaded.model, self.config)
        self.scheduler = Scheduler(self.config, self.runner.kv_pool.num_pages)
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
        """One forward. If it fails, the requests are as before the step, and may go on."""
        try:
            return list(self.runner.run(batch, self.scheduler.kv_cache.table).rows())
        except BaseException:
            self.scheduler.undo(batch)
            raise

    def process(self, batch: ScheduleBatch, result: list[SampledToken]) -> list[RequestOutput]:
        """Hand each request its token; release those that end with it."""
        self.counters.num_steps += bool(batch.requests)
        for request, num_tokens in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            of_prompt = max(0, request.num_prompt_tokens - request.num_computed_tokens)
            self.counters.prefill_tokens += min(num_tokens, of_prompt)
            self.counters.decode_tokens += max(0, num_tokens - of_prompt)
            request.num_computed_tokens += num_tokens
        sampled = [batch.requests[i] for i in batch.sampled]
        for request, (token_id, logprobs) in zip(sampled, result, strict=True):
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

    def stats(self) -> EngineStats:
        kv_cache = self.scheduler.kv_cache
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            kv_tokens_reserved=kv_cache.num_reserved_tokens,
            kv_tokens_used=sum(r.num_computed_tokens for r in self.scheduler.running),
            kv_pages_total=kv_cache.allocator.num_pages,
            kv_pages_free=kv_cache.num_free_pages,
            **{**asdict(self.counters), "num_retractions": self.scheduler.num_retractions},
        )

    def check_invariants(self) -> None:
        self.check_requests()
        self.scheduler.check_invariants()
