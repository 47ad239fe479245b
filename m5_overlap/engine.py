"""`LLMEngine`: the life of a request, from `add_request` to its final output.

    step():  launch step N+1    which requests, how many tokens of each; its forward is queued
             wait for step N    whose forward has been running meanwhile
             process step N     text, stops, outputs; what has ended is released; N+1 runs already

    host      | launch 2 | wait 1 | process 1, launch 3 | wait 2 | process 2, launch 4 | ...
    forward   | 1 ................| 2 ...........................| 3 ...................

Upholds I3 (what ends is released at once), I4 (a bad request is refused before anybody sees it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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
from common.engine_call import ForwardError
from common.outputs import StepCounters
from common.sampler import SampledToken

from .model_runner import ModelRunner, StepResult
from .scheduler import ScheduleBatch, Scheduler


class LLMEngine(OfflineEngine):
    """Runs requests to their ends, one `step` at a time."""

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        super().__init__(config, loaded)
        self.runner = ModelRunner(self.loaded.model, self.config)
        self.scheduler = Scheduler(self.config, self.runner.kv_pool.num_pages)
        self.result_queue: deque[tuple[ScheduleBatch, StepResult]] = deque()  # oldest first
        self.counters = StepCounters()

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        request = self.input_processor.make_request(prompt, params, request_id)
        self.scheduler.add_request(request)
        self.output_processor.add_request(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """The outputs of one step. When it returns, the next one is being computed already."""
        if not self.result_queue:
            self.launch()  # the first step: nothing runs that it could overlap
        if not self.result_queue:
            return self.output_processor.drain()
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        if self.config.enable_overlap and not self.scheduler.needs_result():
            self.launch()  # step N+1, while step N runs
        return self.process(batch, self.wait(result))

    def launch(self) -> None:
        """Plan a step, and have its forward run after what is in flight."""
        batch = self.scheduler.schedule()
        if batch.requests:
            with self._undoing(batch):
                result = self.runner.launch(batch, self.scheduler.kv_cache.table)
            self.result_queue.append((batch, result))
        else:
            self.scheduler.isolation.passed([])

    def wait(self, result: StepResult) -> list[SampledToken]:
        """The tokens of a step: the one place where the host waits for the device."""
        batch, _result = self.result_queue[0]
        with self._undoing(batch):
            tokens = result.wait()
        self.scheduler.isolation.passed(batch.requests)
        return tokens

    def process(self, batch: ScheduleBatch, result: list[SampledToken]) -> list[RequestOutput]:
        """Hand each request its token; release those that end with it.

        A request that has ended since the step was launched gets nothing: its token is dropped.
        """
        self.result_queue.popleft()
        self.scheduler.in_flight.finish(batch)
        self.counters.num_steps += 1
        for request, num_tokens in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            if request.is_finished:
                self.counters.padding_tokens += num_tokens
                continue
            before = request.num_computed_tokens - num_tokens
            of_prompt = min(num_tokens, max(0, request.num_prompt_tokens - before))
            self.counters.prefill_tokens += of_prompt
            self.counters.decode_tokens += num_tokens - of_prompt
            if of_prompt > 0:
                self.scheduler.kv_cache.insert(request)  # others may read it from now on
        sampled = [batch.requests[i] for i in batch.sampled]
        for request, (token_id, logprobs) in zip(sampled, result, strict=True):
            if request.is_finished:
                continue
            if self.output_processor.append_token(request, token_id, logprobs):
                self.release(request)
        self.drop_dead_step()
        return self.output_processor.drain()

    def cancel(self) -> None:
        """Forget what is in flight: its requests are as before, and may go on."""
        self.runner.synchronize()
        self.result_queue.clear()
        while batches := self.scheduler.in_flight.batches:
            self.scheduler.undo(batches[-1])

    def drop_dead_step(self) -> None:
        """A step in flight whose requests have all ended is nobody's: free what it holds."""
        if self.result_queue and all(r.is_finished for r in self.result_queue[-1][0].requests):
            self.cancel()

    def abort_request(self, request_id: str) -> bool:
        request = self.output_processor.find(request_id)
        if request is None:
            return False
        self.release(request)
        self.output_processor.abort(request)
        self.drop_dead_step()
        return True

    def close(self) -> None:
        super().close()
        self.runner.stream.close()

    @contextmanager
    def _undoing(self, batch: ScheduleBatch) -> Iterator[None]:
        """If this part of a batch's forward fails, nothing of what is in flight has happened.

        A request of the batch that has ended since its launch is not tried again.
        """
        try:
            yield
        except BaseException as error:
            self.cancel()
            live = [request for request in batch.requests if not request.is_finished]
            raise ForwardError(live, error) from error

    def release(self, request: Request) -> None:
        """I3: give back all that a request holds, whether it waits or runs."""
        self.scheduler.remove_request(request)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no request is using; how many pages are free by that."""
        kv_cache = self.scheduler.kv_cache
        pages = kv_cache.radix_cache.evict(kv_cache.radix_cache.evictable_size)
        kv_cache.allocator.free(pages)
        return len(pages)

    def stats(self) -> EngineStats:
        kv_cache = self.scheduler.kv_cache
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            kv_tokens_reserved=kv_cache.num_reserved_tokens,
            kv_tokens_used=kv_cache.num_used_tokens(
                [*self.scheduler.running, *self.scheduler.in_flight.leaving]
            ),
            kv_pages_total=kv_cache.allocator.num_pages,
            kv_pages_free=len(kv_cache.allocator.free_pages),
            kv_pages_cached=kv_cache.radix_cache.evictable_size,
            **{
                **asdict(self.counters),
                "num_retractions": self.scheduler.num_retractions,
                "cached_prompt_tokens": self.scheduler.cached_prompt_tokens,
            },
        )

    def check_invariants(self) -> None:
        self.check_requests()
        self.scheduler.check_invariants()
