"""`Scheduler`: which requests a step computes, and how many tokens of each.

Plain Python data, no tensors. A step is either a prefill of the requests that join, or a decode of
all running requests; prefill comes first. Upholds I5: requests join in the order in which they
arrived, and no request overtakes another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, SampledToken, append_token
from common.outputs import StepCounters

from .kv_cache import KVCacheManager
from .schedule_batch import ScheduleBatch


class Scheduler:
    """Owns the waiting queue and the running list. A live request is in exactly one of them."""

    def __init__(self, config: EngineConfig) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # A decode step computes a token of each running request, so the token budget bounds them.
        self.max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        assert config.max_model_len is not None
        self.kv_cache = KVCacheManager(self.max_num_running, config.max_model_len)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = StepCounters()

    def add_request(self, request: Request) -> None:
        """Append a request to the waiting queue.

        Raises `ValueError` for a prompt that no step could ever compute (I4).
        """
        if request.num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"prompt has {request.num_tokens} tokens, but one step computes a whole prompt and "
                f"at most max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        self.waiting.append(request)

    def schedule(self) -> ScheduleBatch:
        """Choose the prompts of all requests that can join; else one token of each running one."""
        if admitted := self._admit():
            return ScheduleBatch(admitted, [request.num_tokens for request in admitted])
        rows = self.kv_cache.rows
        return ScheduleBatch(list(rows), [1] * len(rows))

    def update_from_output(
        self, batch: ScheduleBatch, sampled: list[SampledToken]
    ) -> list[EngineCoreOutput]:
        """Advance the requests of a computed batch, append their tokens, and count."""
        self.counters.num_steps += bool(batch.requests)
        self.counters.padding_tokens += batch.num_padding_tokens
        for request, num_tokens in batch.tokens_per_request():
            of_prompt = max(0, request.num_prompt_tokens - request.num_computed_tokens)
            self.counters.prefill_tokens += min(num_tokens, of_prompt)
            self.counters.decode_tokens += max(0, num_tokens - of_prompt)
            request.num_computed_tokens += num_tokens
        outputs = []
        for request, token in zip(batch.requests, sampled, strict=True):
            outputs.append(output := append_token(request, token))
            if output.finish_reason is not None:
                self.finish_request(request, output.finish_reason)
        return outputs

    def undo(self, batch: ScheduleBatch) -> None:
        """Undo `schedule`: the forward failed. Requests that joined go back to the queue's head."""
        for request in reversed(batch.requests):
            if request.num_computed_tokens == 0:
                self.send_back(request)

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        """End a request, remove it from its queue, and free its row."""
        request.finish_reason = reason
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.kv_cache.free(request)

    def send_back(self, request: Request) -> None:
        """Free the memory of a running request, and move it to the head of the waiting queue."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def make_stats(self) -> EngineStats:
        """Return the counters, and the state of the queues and of the KV cache."""
        return EngineStats(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            kv_tokens_reserved=self.kv_cache.num_reserved_tokens,
            kv_tokens_used=self.kv_cache.num_used_tokens,
            **asdict(self.counters),
        )

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the queues or the KV cache break an invariant."""
        assert len(self.running) <= self.max_num_running, (
            f"I5: {len(self.running)} requests run, more than {self.max_num_running}"
        )
        for request in self.waiting:
            assert request.num_computed_tokens == 0, f"I3: {request} waits, but it holds KV"
        self.kv_cache.check_invariants(self.running)

    def _admit(self) -> list[Request]:
        """Move requests from waiting to running while a row is free and the token budget lasts.

        All prompts of one step are padded to the longest, and the padding is computed too. The
        budget therefore counts all positions of the padded batch. After a failed step, a request
        with its output may be longer than the budget. It is then computed alone (I5).
        """
        admitted: list[Request] = []
        longest = 0
        while self.waiting and self.kv_cache.has_free_row:
            longest = max(longest, self.waiting[0].num_tokens)
            if admitted and longest * (len(admitted) + 1) > self.max_num_batched_tokens:
                break
            request = self.waiting.popleft()
            self.kv_cache.allocate(request)
            self.running.append(request)
            admitted.append(request)
        return admitted
