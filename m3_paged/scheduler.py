"""`Scheduler`: which requests a step computes, and how many tokens of each.

Plain Python data, no tensors. A step holds one token of each decoding request and, in the room that
is left, chunks of prompts. Upholds I5: first come, first served; the oldest request always moves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common import EngineConfig, FailureIsolation, Request

from .kv_cache import KVCacheManager

INITIAL_NEW_TOKEN_RATIO = 0.7  # the share of its remaining tokens that a request is expected to use
MIN_NEW_TOKEN_RATIO = 0.1
RATIO_DECAY = (INITIAL_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600  # a step
RETRACTION_HEADROOM = 20  # tokens that each running request should get before the next retraction


@dataclass
class ScheduleBatch:
    """The decision for one step: `num_scheduled_tokens[i]` tokens of `requests[i]`.

    They start at the request's `num_computed_tokens`. Decodes come first, then chunks. Of
    `requests[i]`, i in `sampled`, the last token is among them: only those get a next token.
    """

    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)


class Scheduler:
    """Owns the waiting queue and the running list; a live request is in exactly one of them."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # A decode step computes a token for each running request: the token budget bounds them too.
        self.max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.kv_cache = KVCacheManager(self.max_num_running, num_pages, config.page_size)
        self.max_kv_tokens = num_pages * config.page_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.isolation = FailureIsolation()
        self.new_token_ratio = INITIAL_NEW_TOKEN_RATIO
        self.num_retractions = 0
        self.retract_every: int | None = None  # for tests: retract somebody every so many steps
        self._steps = 0
        self._tokens_when_retracted: dict[Request, int] = {}

    def add_request(self, request: Request) -> None:
        """Raise `ValueError` for a prompt that the pool could never hold (I4).

        A request that would outgrow the pool ends by length when the pool is full.
        """
        if request.num_tokens > self.max_kv_tokens:
            raise ValueError(
                f"prompt has {request.num_tokens} tokens, more than the KV pool's "
                f"{self.max_kv_tokens} (num_pages={self.kv_cache.allocator.num_pages} of "
                f"page_size={self.kv_cache.page_size})"
            )
        request.max_num_tokens = min(request.max_num_tokens, self.max_kv_tokens + 1)
        self.waiting.append(request)

    def schedule(self) -> ScheduleBatch:
        """One token of each decoding request; then chunks of who runs, then of who can join."""
        self._force_retraction()
        batch = ScheduleBatch()
        # Decodes first: a chunk must not take the page that a decode needs.
        for request in self.isolation.allowed(self.running):
            if request.row is not None and request.num_tokens - request.num_computed_tokens == 1:
                self._make_room(request)
                if request.row is not None:
                    self._add(batch, request, 1)
        for request in self.isolation.allowed(self.running):
            if request.row is not None and request.num_tokens - request.num_computed_tokens > 1:
                if not batch.requests:
                    self._make_room(request)  # I5: the oldest moves, whatever it takes
                self._add_chunk(batch, request)
        while self._can_admit(batch):
            request = self.waiting.popleft()
            self.kv_cache.allocate(request)
            self.running.append(request)
            self._add_chunk(batch, request)
        self.new_token_ratio = max(MIN_NEW_TOKEN_RATIO, self.new_token_ratio - RATIO_DECAY)
        return batch

    def undo(self, batch: ScheduleBatch) -> None:
        """The batch was not computed: give back what was allocated for it."""
        for request in reversed(batch.requests):
            if request.num_computed_tokens == 0:
                self._back_to_waiting(request)
            else:
                self.kv_cache.hold(request, request.num_computed_tokens)

    def remove_request(self, request: Request) -> None:
        """Take a request that ends out of its queue."""
        self.isolation.forget(request)
        self._tokens_when_retracted.pop(request, None)
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.kv_cache.free(request)

    def check_invariants(self) -> None:
        assert len(self.running) <= self.max_num_running, (
            f"I5: {len(self.running)} requests run, more than {self.max_num_running}"
        )
        for request in self.waiting:
            assert request.num_computed_tokens == 0, f"I3: {request} waits and holds KV"
        self.kv_cache.check_invariants(self.running)

    def _add(self, batch: ScheduleBatch, request: Request, num_tokens: int) -> None:
        self.kv_cache.hold(request, request.num_computed_tokens + num_tokens)
        if request.num_computed_tokens + num_tokens == request.num_tokens:
            batch.sampled.append(len(batch.requests))
        batch.requests.append(request)
        batch.num_scheduled_tokens.append(num_tokens)

    def _add_chunk(self, batch: ScheduleBatch, request: Request) -> None:
        """As much of what a request has not computed as the step and the pool have room for."""
        rest = request.num_tokens - request.num_computed_tokens
        budget = self.max_num_batched_tokens - sum(batch.num_scheduled_tokens)
        if (chunk := min(rest, budget, self.kv_cache.room(request))) > 0:
            self._add(batch, request, chunk)

    def _can_admit(self, batch: ScheduleBatch) -> bool:
        """Three budgets: rows, tokens of this step and, if anybody runs, KV memory until all end.

        Memory is promised to the running requests first: all of their prompts, and of the tokens
        they may still generate the share that experience says they will (`new_token_ratio`).
        """
        if not self.waiting or not self.kv_cache.has_free_row:
            return False
        if not self.isolation.allows(self.waiting[0]):
            return False
        if sum(batch.num_scheduled_tokens) >= self.max_num_batched_tokens:
            return False
        if not self.running:
            return True  # I5: alone, a request has the pool to itself
        candidates = [*self.running, self.waiting[0]]
        expected = sum(self._expected_pages(r) - len(self.kv_cache.pages_of(r)) for r in candidates)
        return expected <= self.kv_cache.num_free_pages

    def _expected_pages(self, request: Request) -> int:
        future = int(self.new_token_ratio * (request.max_num_tokens - request.num_tokens))
        return self.kv_cache.pages_for(request.num_tokens + future)

    def _make_room(self, request: Request) -> None:
        """Retract the newest requests until this one can compute a token; at worst, itself."""
        while request.row is not None and self.kv_cache.room(request) == 0:
            self._retract(self.running[-1])

    def _retract(self, request: Request) -> None:
        """Take all of a running request's memory; it will compute its tokens again.

        The ratio was too hopeful: from now on expect what has been generated so far, and some steps
        more. It decays again while all goes well.
        """
        generated = sum(r.num_output_tokens + RETRACTION_HEADROOM for r in self.running)
        allowed = sum(r.max_num_tokens - r.num_prompt_tokens for r in self.running)
        self.new_token_ratio = min(1.0, max(self.new_token_ratio, generated / allowed))
        self.num_retractions += 1
        self._back_to_waiting(request)

    def _back_to_waiting(self, request: Request) -> None:
        """To the head of the queue: it is older than all that wait."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def _force_retraction(self) -> None:
        """For tests: every `retract_every` steps, the newest request that has a token to show for
        its last retraction is retracted again."""
        self._steps += 1
        if self.retract_every is None or self._steps % self.retract_every:
            return
        before = self._tokens_when_retracted
        moved = [r for r in self.running if r.num_tokens > before.get(r, r.num_prompt_tokens)]
        if moved:
            before[moved[-1]] = moved[-1].num_tokens
            self._retract(moved[-1])
