"""`KVCacheManager`: requests share a cached prefix only if they have the same adapter."""

from __future__ import annotations

from common import Request

from .m5_kv_cache import PADDING_PAGE, PageAllocator, PageTable
from .m5_kv_cache import KVCacheManager as M5KVCacheManager

__all__ = ["PADDING_PAGE", "KVCacheManager", "PageAllocator", "PageTable"]

ADAPTER_KEY = 2**32  # larger than any token id


class KVCacheManager(M5KVCacheManager):
    """The prefixes of two adapters share no node of the tree."""

    def cache_key(self, request: Request, num_tokens: int) -> list[int]:
        """Return the first tokens of a request, as the radix tree knows them.

        The keys and values of a prefix depend on the adapter. Therefore the number of the adapter's
        load is a part of the first token. The number is never used again. A name or a slot can
        later mean other matrices.
        """
        key = super().cache_key(request, num_tokens)
        if key and request.adapter is not None:
            key[0] += request.adapter.number * ADAPTER_KEY
        return key
