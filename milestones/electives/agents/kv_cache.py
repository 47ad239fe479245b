"""`KVCacheManager`: requests that end may belong to conversations that go on. Plain Python data."""

from __future__ import annotations

from common import Request

from .conversations import Conversations
from .hi_radix_cache import HiRadixCache
from .priority_kv_cache import PADDING_PAGE, PageAllocator, PageTable
from .priority_kv_cache import KVCacheManager as PriorityKVCacheManager

__all__ = ["PADDING_PAGE", "KVCacheManager", "PageAllocator", "PageTable"]


class KVCacheManager(PriorityKVCacheManager):
    """Tells `Conversations` when a request gets its pages, and when it frees them."""

    radix_cache: HiRadixCache

    def __init__(self, num_rows: int, num_pages: int, page_size: int) -> None:
        super().__init__(num_rows, num_pages, page_size)
        self.conversations = Conversations(self.radix_cache)

    def allocate(self, request: Request) -> None:
        super().allocate(request)
        self.conversations.resume(request)

    def free(self, request: Request) -> None:
        row = request.row
        assert row is not None, f"I3: {request} has no row to free"
        self.insert(request)
        node = self.last_nodes[row]
        if request.is_finished:
            self.conversations.resume(request)  # its prefix is locked, so none of it is released
        super().free(request)
        if request.is_finished:  # it is not only sent back
            self.conversations.pause(request, node)
