"""`Admission`: whether a waiting request may join the running ones. Plain Python data, no tensors.

A request that joins needs a row, a token of this step's budget, and KV memory until it finishes.
How much memory it will need is not known: `max_tokens` is only an upper bound. The estimate
(`new_token_ratio`) is from SGLang.
"""

from __future__ import annotations

from common import EngineConfig, Request

from .add_req_result import AddReqResult
from .kv_cache import KVCacheManager
from .schedule_batch import ScheduleBatch

INITIAL_NEW_TOKEN_RATIO = 0.7  # the share of its remaining tokens that a request is expected to use
MIN_NEW_TOKEN_RATIO = 0.1
RATIO_DECAY = (INITIAL_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600  # per step
RETRACTION_HEADROOM = 20  # tokens that each running request should get before the next retraction
CLIP_MAX_NEW_TOKENS = 4096  # a generous `max_tokens` must not keep all others waiting


class Admission:
    """Compares the memory that requests are expected to need with the memory that is free."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.kv_cache = kv_cache
        self.new_token_ratio = INITIAL_NEW_TOKEN_RATIO

    def budget_state(self, batch: ScheduleBatch) -> AddReqResult:
        """Return whether a row is free, and a token of this step's budget."""
        if not self.kv_cache.has_free_row:
            return AddReqResult.NO_ROW
        if batch.num_tokens >= self.max_num_batched_tokens:
            return AddReqResult.NO_BUDGET
        return AddReqResult.CONTINUE

    def check(self, request: Request, batch: ScheduleBatch, running: list[Request]) -> AddReqResult:
        """Return whether a waiting request joins this step, or why not."""
        if (state := self.budget_state(batch)) is not AddReqResult.CONTINUE:
            return state
        return AddReqResult.CONTINUE if self.fits(request, running) else AddReqResult.NO_MEMORY

    def fits(self, request: Request, running: list[Request]) -> bool:
        """Return whether the KV memory is expected to last until all requests have finished.

        The running requests come first. Each is expected to need its tokens so far, and the share
        `new_token_ratio` of the tokens that it may still generate.
        """
        if not running:
            return True  # I5: a request that runs alone may use the whole pool
        requests = [*running, request]
        missing = sum(self.expected_pages(r) - len(self.kv_cache.pages_of(r)) for r in requests)
        return missing <= self.kv_cache.num_free_pages

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
