"""`Scheduler`: which requests a step computes. Here: one request until it finishes, then the next.

Plain Python data, no tensors. Upholds I5: requests run in the order in which they arrived.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from common import EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, SampledToken, append_token
from common.outputs import StepCounters

from .schedule_batch import ScheduleBatch


class Scheduler:
    """Owns the waiting queue and the running list. A live request is in exactly one of them."""

    def __init__(self, *, use_cache: bool = True) -> None:
        self.use_cache = use_cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = StepCounters()

    def add_request(self, request: Request) -> None:
        """Append a request to the waiting queue."""
        self.waiting.append(request)

    def schedule(self) -> ScheduleBatch:
        """Choose all tokens of the running request that are not computed yet.

        In the first step these are its prompt, later the token that was sampled last.
        """
        if self.waiting and not self.running:
            self.running.append(self.waiting.popleft())
        return ScheduleBatch(
            requests=list(self.running),
            num_scheduled_tokens=[r.num_tokens - r.num_computed_tokens for r in self.running],
        )

    def update_from_output(
        self, batch: ScheduleBatch, sampled: list[SampledToken]
    ) -> list[EngineCoreOutput]:
        """Advance the requests of a computed batch, append their tokens, and count."""
        self.counters.num_steps += bool(batch.requests)
        for request, num_tokens in batch.tokens_per_request():
            of_prompt = max(0, request.num_prompt_tokens - request.num_computed_tokens)
            self.counters.prefill_tokens += min(num_tokens, of_prompt)
            self.counters.decode_tokens += max(0, num_tokens - of_prompt)
            if self.use_cache:
                request.num_computed_tokens += num_tokens
        outputs = []
        for request, token in zip(batch.requests, sampled, strict=True):
            outputs.append(output := append_token(request, token))
            if output.finish_reason is not None:
                self.finish_request(request, output.finish_reason)
        return outputs

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        """End a request, and remove it from its queue."""
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def send_back(self, request: Request) -> None:
        """Move a request from the running list to the head of the waiting queue."""
        self.running.remove(request)
        self.waiting.appendleft(request)

    def make_stats(self) -> EngineStats:
        """Return the counters, and the state of the queues and of the KV cache."""
        cached = sum(request.num_computed_tokens for request in self.running)
        return EngineStats(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            kv_tokens_reserved=cached,
            kv_tokens_used=cached,
            **asdict(self.counters),
        )

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the queues break an invariant."""
        assert len(self.running) <= 1, f"I3: one request runs at a time, not {self.running}"
        for request in self.waiting:
            assert request.num_computed_tokens == 0, f"I3: {request} waits, but it holds KV"
