"""`Scheduler`: which requests a step computes, and how many tokens of each.

Plain Python data, no tensors. A step holds one token of each decoding request and, in the room that
is left, chunks of prompts. Upholds I5: the policy bounds the wait; the oldest request always moves.

A step is planned while the one before is in flight, from what is known of it in advance: lengths,
and who will have all the tokens that it may have, but not what it will say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common import EngineConfig, FailureIsolation, Request

from .in_flight import StepsInFlight, num_rows
from .kv_cache import KVCacheManager
from .policy import SchedulePolicy

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
    is_advanced: bool = False  # its requests are where it will leave them: see `StepsInFlight`

    @property
    def is_decode(self) -> bool:
        """One token of each request, and one sampled for each."""
        return len(self.sampled) == len(self.requests) == sum(self.num_scheduled_tokens)


class Scheduler:
    """Owns the waiting queue and the running list; a live request is in exactly one of them."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # A decode step computes a token for each running request: the token budget bounds them too.
        self.max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.kv_cache = KVCacheManager(num_rows(config), num_pages, config.page_size)
        self.max_kv_tokens = num_pages * config.page_size
        self.policy = SchedulePolicy(config, self.kv_cache)
        self.waiting: deque[Request] = deque()  # oldest first
        self.running: list[Request] = []  # oldest first
        self.in_flight = StepsInFlight(self.kv_cache)
        self.isolation = FailureIsolation()
        self.new_token_ratio = INITIAL_NEW_TOKEN_RATIO
        self.num_retractions = 0
        self.cached_prompt_tokens = 0
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
        self.policy.on_arrival(request, len(self.waiting))
        self.waiting.append(request)

    def schedule(self) -> ScheduleBatch:
        """One token of each decoding request; then chunks of who runs, then of who can join."""
        self._force_retraction()
        batch = ScheduleBatch()
        # Decodes first: a chunk must not take the page that a decode needs.
        for request in self.isolation.allowed(self._moving()):
            if request.row is not None and request.num_tokens - request.num_computed_tokens == 1:
                self._make_room(request)
                if request.row is not None:
                    self._add(batch, request, 1)
        for request in self.isolation.allowed(self._moving()):
            if request.row is not None and request.num_tokens - request.num_computed_tokens > 1:
                if not batch.requests:
                    self._make_room(request)  # I5: the oldest moves, whatever it takes
                self._add_chunk(batch, request)
        if self._can_admit(batch):
            for request in self.isolation.allowed(self.policy.order(self.waiting)):
                if self._waits_for_prefix(request):
                    continue
                if not self._can_admit(batch) or not self._fits(request):
                    break
                self._admit(request)
                self._add_chunk(batch, request)
        self.new_token_ratio = max(MIN_NEW_TOKEN_RATIO, self.new_token_ratio - RATIO_DECAY)
        if batch.requests:
            self.in_flight.batches.append(batch)
        return batch

    def needs_result(self) -> bool:
        """Return whether the next step must not be planned before the step in flight has ended.

        Memory is short, and a request that ends may make a retraction needless; or the cause of a
        failure is searched; or a request waits for a prefix that the step in flight computes."""
        forced = self.retract_every is not None and (self._steps + 1) % self.retract_every == 0
        size = self.kv_cache.page_size
        new_pages = sum(request.num_computed_tokens % size == 0 for request in self._moving())
        short = new_pages > self.kv_cache.num_free_pages
        return forced or short or self.isolation.is_active or self._is_computing_a_shared_prefix()

    def undo(self, batch: ScheduleBatch) -> None:
        """The newest batch was not computed: give back what was allocated for it."""
        self.in_flight.take_back(batch)
        for request in reversed([r for r in batch.requests if not r.is_finished]):
            if request.num_computed_tokens == 0:
                self._back_to_waiting(request)
            else:
                self.kv_cache.hold(request, request.num_computed_tokens)
        while not self.in_flight.batches and len(self.running) > self.max_num_running:
            self._back_to_waiting(self.running[-1])  # it came for one that now does not end

    def remove_request(self, request: Request) -> None:
        """Take a request that ends out of its queue."""
        self.isolation.forget(request)
        self._tokens_when_retracted.pop(request, None)
        self.policy.on_removal(request)
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.in_flight.leave(request)

    def check_invariants(self) -> None:
        assert len(self.running) <= self.max_num_running, (
            f"I5: {len(self.running)} requests run, more than {self.max_num_running}"
        )
        for request in self.waiting:
            assert request.num_computed_tokens == 0, f"I3: {request} waits and holds KV"
        self.in_flight.check_invariants(self.running)

    def _moving(self) -> list[Request]:
        """Who runs and goes on after the step in flight, as far as is known."""
        return [r for r in self.running if r.num_tokens < r.max_num_tokens]

    def _is_computing_a_shared_prefix(self) -> bool:
        """Whether a waiting request would be admitted, but for a prefix that is in flight."""
        in_flight = [r for batch in self.in_flight.batches for r in batch.requests]
        if all(r.num_output_tokens > 1 for r in in_flight) or not self._can_admit(ScheduleBatch()):
            return False
        return any(self._waits_for_prefix(r) for r in self.policy.order(self.waiting))

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
        """The budgets of rows, and of tokens of this step."""
        budget = self.max_num_batched_tokens - sum(batch.num_scheduled_tokens)
        has_room = len(self._moving()) < self.max_num_running
        return bool(self.waiting) and has_room and budget > 0

    def _fits(self, request: Request) -> bool:
        """The budget of KV memory until everybody is done; not asked for when nobody runs.

        Memory is promised to the running requests first: all of their prompts, and of the tokens
        they may still generate the share that experience says they will (`new_token_ratio`). Pages
        of a cached prefix come for nothing only where they are in use already.
        """
        if not self.running:
            return True  # I5: alone, a request has the pool to itself
        expected = self._expected_pages(request) - self.kv_cache.find_prefix(request).num_locked
        expected += sum(
            self._expected_pages(r) - len(self.kv_cache.pages_of(r)) for r in self.running
        )
        return expected <= self.kv_cache.num_free_pages

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a running request is computing the page that comes next after what is cached of
        this one: then it is better to wait for it than to compute it twice."""
        end = (self.kv_cache.find_prefix(request).num_pages + 1) * self.kv_cache.page_size
        if end >= request.num_tokens or self.policy.is_due(request):
            return False
        tokens = request.token_ids[:end]
        return any(
            self.kv_cache.num_inserted_tokens(r) < end <= r.num_prompt_tokens
            and r.token_ids[:end] == tokens
            for r in self.running
        )

    def _admit(self, request: Request) -> None:
        self.waiting.remove(request)
        self.policy.on_admission(request)
        self.kv_cache.allocate(request)
        self.running.append(request)
        cached = min(request.num_computed_tokens, request.num_prompt_tokens)
        self.cached_prompt_tokens += cached
        if request.num_cached_tokens is None:  # not after a retraction: that finds its own pages
            request.num_cached_tokens = cached

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
        assert not self.in_flight.batches, "nobody is retracted whose result is on its way"
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
        self.policy.on_retraction(request)
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
