"""`Scheduler`: which requests a step computes, and how many tokens of each.

Plain Python data, no tensors. A step is a prefill of requests that join, or a decode of all that
run; prefill comes first. Upholds I5: first come, first served, and nobody overtakes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common import EngineConfig, FailureIsolation, Request

from .kv_cache import KVCacheManager, Move


@dataclass
class ScheduleBatch:
    """The decision for one step: `num_scheduled_tokens[i]` tokens of `requests[i]`.

    They start at the request's `num_computed_tokens`.
    """

    requests: list[Request]
    num_scheduled_tokens: list[int]

    @property
    def num_padding_tokens(self) -> int:
        """Positions of the padded batch [requests, longest] that belong to no request."""
        if not self.requests:
            return 0
        longest = max(self.num_scheduled_tokens)
        return longest * len(self.requests) - sum(self.num_scheduled_tokens)


class Scheduler:
    """Owns the waiting queue and the running list; a live request is in exactly one of them."""

    def __init__(self, config: EngineConfig) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # A decode step computes a token for each running request: the token budget bounds them too.
        self.max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        assert config.max_model_len is not None
        self.kv_cache = KVCacheManager(self.max_num_running, config.max_model_len)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.isolation = FailureIsolation()

    def add_request(self, request: Request) -> None:
        """Raise `ValueError` for a prompt that no step could ever compute (I4)."""
        if request.num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"prompt has {request.num_tokens} tokens and is computed in one step of at most "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        self.waiting.append(request)

    def schedule(self) -> ScheduleBatch:
        """The prompts of all requests that can join now; if none can, one token of each running."""
        if admitted := self._admit():
            return ScheduleBatch(admitted, [request.num_tokens for request in admitted])
        if self.isolation.is_active:
            self._keep_only_allowed()
        rows = self.kv_cache.rows
        return ScheduleBatch(list(rows), [1] * len(rows))

    def undo(self, batch: ScheduleBatch) -> None:
        """The batch was not computed: requests that joined with it go back to the queue's head."""
        for request in reversed(batch.requests):
            if request.num_computed_tokens == 0:
                self.remove_request(request)
                self.waiting.appendleft(request)

    def remove_request(self, request: Request) -> Move | None:
        """Take a request that ends out of its queue. Its row may be filled by another's move."""
        self.isolation.forget(request)
        if request.row is None:
            self.waiting.remove(request)
            return None
        self.running.remove(request)
        return self.kv_cache.free(request)

    def check_invariants(self) -> None:
        assert len(self.running) <= self.max_num_running, (
            f"I5: {len(self.running)} requests run, more than {self.max_num_running}"
        )
        for request in self.waiting:
            assert request.num_computed_tokens == 0, f"I3: {request} waits and holds KV"
        self.kv_cache.check_invariants(self.running)

    def _keep_only_allowed(self) -> None:
        """While the cause of a failure is searched, let the other requests start again later.

        A decode reads the first rows. The requests to try are there: a group is a part of a batch
        in its order. So the last rows leave, and no row has to move.
        """
        for request in reversed(list(self.kv_cache.rows)):
            if not self.isolation.allows(request):
                self.running.remove(request)
                move = self.kv_cache.free(request)
                assert move is None, f"I3: {request} is not in the last row"
                request.num_computed_tokens = 0
                self.waiting.appendleft(request)

    def _admit(self) -> list[Request]:
        """Move requests from waiting to running while a row is free and the token budget lasts.

        The prompts of one step are padded to the longest, and the padding is computed too: the
        budget counts all positions of the padded batch. After a failed step, a request with its
        output may be longer than the budget: it is computed alone (I5).
        """
        admitted: list[Request] = []
        longest = 0
        while self.waiting and self.kv_cache.has_free_row:
            longest = max(longest, self.waiting[0].num_tokens)
            if admitted and longest * (len(admitted) + 1) > self.max_num_batched_tokens:
                break
            if not self.isolation.allows(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.kv_cache.allocate(request)
            self.running.append(request)
            admitted.append(request)
        return admitted
