"""`Admission`: the pages of a request are those of all groups of layers."""

from __future__ import annotations

from common import Request

from .hybrid_kv_cache import HybridKVCacheManager
from .m5_admission import INITIAL_NEW_TOKEN_RATIO, RATIO_DECAY
from .m5_admission import Admission as M5Admission

__all__ = ["INITIAL_NEW_TOKEN_RATIO", "RATIO_DECAY", "Admission"]


class Admission(M5Admission):
    """Compares the pages that requests are expected to need in all groups with the free ones."""

    kv_cache: HybridKVCacheManager

    def fits(self, request: Request, running: list[Request]) -> bool:
        if not running:
            return True  # I5: a request that runs alone may use the whole pool
        missing = self.expected_pages(request) - self.kv_cache.find_prefix(request).num_locked
        for other in running:  # in its windows, a request may hold more than it will need
            missing += max(0, self.expected_pages(other) - self.kv_cache.num_pages_of(other))
        return missing <= self.kv_cache.num_free_pages

    def expected_pages(self, request: Request) -> int:
        """Return the number of pages that a request is expected to need until it finishes.

        In a group with a window, it needs the most in a step that computes a chunk of its prompt.
        """
        num_tokens = super().expected_pages(request) * self.kv_cache.page_size
        chunk = min(self.max_num_batched_tokens, max(1, request.num_uncomputed_tokens))
        return self.kv_cache.allocator.most_pages(num_tokens, chunk)
