"""`KVCacheManager`: a cached page has no hidden states, so not every request can use it."""

from __future__ import annotations

from common import Request

from .m5_kv_cache import PADDING_PAGE, PageAllocator, PageTable
from .m5_kv_cache import KVCacheManager as M5KVCacheManager
from .pooling_request import PoolingRequest

__all__ = ["PADDING_PAGE", "KVCacheManager", "PageAllocator", "PageTable"]


class KVCacheManager(M5KVCacheManager):
    """I3: pages of rows, of the tree, free pages and the padding page partition the pool."""

    def _cacheable_tokens(self, request: Request) -> list[int]:
        """Return the tokens that a cache can serve: whole pages, but never the last token.

        The last token must always be computed, because its logits give the next token (I1), or its
        hidden state gives the vector. A cache has no hidden states, so a request that needs those
        of all tokens uses no cached page.
        """
        if isinstance(request, PoolingRequest) and request.needs_all_tokens:
            return []
        return super()._cacheable_tokens(request)
