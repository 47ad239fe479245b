"""`Admission`: whether a waiting request may join the running ones. Plain Python data, no tensors.

A request that joins needs a row, a token of this step's budget, and KV memory until it finishes.
How much memory it will need is not known: `max_tokens` is only an upper bound. The estimate
(`new_token_ratio`) is from SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common import EngineConfig, Request

from .add_req_result import AddReqResult
from .in_flight import continuing
from .kv_cache import KVCacheManager
from .policy import SchedulePolicy
from .schedule_batch import ScheduleBatch

INITIAL_NEW_TOKEN_RATIO = 0.7  # the share of its remaining tokens that a request is expected to use
MIN_NEW_TOKEN_RATIO = 0.1
RATIO_DECAY = (INITIAL_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600  # per step
RETRACTION_HEADROOM = 20  # tokens that each running request should get before the next retraction
CLIP_MAX_NEW_TOKENS = 4096  # a generous `max_tokens` must not keep all others waiting
LEAST_SHARED_PAGES = 2  # for less, a request does not wait a step


class Admission:
    """Compares the memory that requests are expected to need with the memory that is free."""

    def __init__(
        self, config: EngineConfig, kv_cache: KVCacheManager, policy: SchedulePolicy
    ) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.kv_cache = kv_cache
        self.policy = policy
        self.new_token_ratio = INITIAL_NEW_TOKEN_RATIO

    def budget_state(self, batch: ScheduleBatch, running: list[Request]) -> AddReqResult:
        """Return whether one more request may run, and a token of this step's budget is free.

        A request that finishes with the step in flight makes room already.
        """
        if len(continuing(running)) >= self.max_num_running:
            return AddReqResult.NO_ROW
        if batch.num_tokens >= self.max_num_batched_tokens:
            return AddReqResult.NO_BUDGET
        return AddReqResult.CONTINUE

    def check(self, request: Request, batch: ScheduleBatch, running: list[Request]) -> AddReqResult:
        """Return whether a waiting request joins this step, or why not."""
        if (state := self.budget_state(batch, running)) is not AddReqResult.CONTINUE:
            return state
        if self.waits_for_prefix(request, running):
            return AddReqResult.PREFIX_IN_FLIGHT
        return AddReqResult.CONTINUE if self.fits(request, running) else AddReqResult.NO_MEMORY

    def fits(self, request: Request, running: list[Request]) -> bool:
        """Return whether the KV memory is expected to last until all requests have finished.

        The running requests come first. Each is expected to need its tokens so far, and the share
        `new_token_ratio` of the tokens that it may still generate. The pages of a cached prefix
        cost nothing only if they are locked. Unlocked ones are counted as free pages already.
        """
        if not running:
            return True  # I5: a request that runs alone may use the whole pool
        missing = self.expected_pages(request) - self.kv_cache.find_prefix(request).num_locked
        missing += sum(self.expected_pages(r) - len(self.kv_cache.pages_of(r)) for r in running)
        return missing <= self.kv_cache.num_free_pages

    def waits_for_prefix(self, request: Request, running: list[Request]) -> bool:
        """Return whether a running request computes the next pages of this request's prefix.

        Then the request waits until they are cached, instead of computing them a second time
        (in-batch prefix sharing).
        """
        if request.needs_prompt_logprobs:
            return False  # it computes its whole prompt in any case
        num_pages = self.kv_cache.find_prefix(request).num_pages + LEAST_SHARED_PAGES
        end = num_pages * self.kv_cache.page_size
        if end >= request.num_tokens or self.policy.is_due(request):
            return False
        key = self.kv_cache.cache_key(request, end)
        return any(
            self.kv_cache.num_inserted_tokens(r) < end <= r.num_prompt_tokens
            and self.kv_cache.cache_key(r, end) == key
            for r in running
        )

    def waits_for_step(
        self,
        waiting: Sequence[Request],
        running: list[Request],
        in_flight: Iterable[ScheduleBatch],
    ) -> bool:
        """Return whether a request could join now, but waits for a prefix of a step in flight."""
        if not waiting or self.budget_state(ScheduleBatch(), running) is not AddReqResult.CONTINUE:
            return False
        computed = [request for batch in in_flight for request in batch.requests]
        if all(request.num_output_tokens > 1 for request in computed):
            return False
        return any(self.waits_for_prefix(r, running) for r in self.policy.order(waiting))

    def expected_pages(self, request: Request) -> int:
        """Return the number of pages that a request is expected to hold when it finishes.

        The number of tokens that may still come is multiplied by the ratio, and rounded down.
        """
        allowed = min(request.max_num_tokens - request.num_tokens, CLIP_MAX_NEW_TOKENS)
        future = int(self.new_token_ratio * allowed)
        return self.kv_cache.pages_for(request.num_tokens + future)

    def reset(self) -> None:
        """Forget what was learned: the engine is idle, and the next requests may be different."""
        self.new_token_ratio = INITIAL_NEW_TOKEN_RATIO

    def expect_less(self) -> None:
        """Lower the ratio a little. It falls as long as no request is retracted."""
        self.new_token_ratio = max(MIN_NEW_TOKEN_RATIO, self.new_token_ratio - RATIO_DECAY)

    def expect_more(self, running: list[Request]) -> None:
        """Raise the ratio, because a request must be retracted: the estimate was too low.

        From now on, a request is expected to use the share that the running requests have generated
        so far, and some more tokens.
        """
        generated = sum(r.num_output_tokens + RETRACTION_HEADROOM for r in running)
        allowed = sum(r.max_num_tokens - r.num_prompt_tokens for r in running)
        self.new_token_ratio = min(1.0, max(self.new_token_ratio, generated / allowed))
