"""`KVCacheManager`: the cached prefixes continue in host memory. Plain Python data, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from common import Request

from .hi_radix_cache import HiRadixCache
from .m5_kv_cache import PADDING_PAGE, PageAllocator, PageTable
from .m5_kv_cache import KVCacheManager as M5KVCacheManager

__all__ = ["PADDING_PAGE", "KVCacheManager", "PageAllocator", "PageTable"]


class KVCacheManager(M5KVCacheManager):
    """A row begins with pages of the tree, and goes on with copies of pages on the host."""

    radix_cache: HiRadixCache

    def __init__(self, num_rows: int, num_pages: int, page_size: int) -> None:
        super().__init__(num_rows, num_pages, page_size)
        self.radix_cache = HiRadixCache(page_size)
        self.last_nodes = [self.radix_cache.root] * num_rows

    @contextmanager
    def without(self, victims: Sequence[Request]) -> Iterator[None]:
        """Count the memory of these requests as free in a context.

        Their prefixes are unlocked, and the pages that only they hold are in the free list. This
        list is a stack: the same pages leave it at the end.
        """
        rows = [victim.row for victim in victims if victim.row is not None]
        nodes = [self.last_nodes[row] for row in rows]
        own = list[int]()
        for row, node in zip(rows, nodes, strict=True):
            own += self.table.rows[row][node.num_prefix_pages :]
        for node in nodes:
            self.radix_cache.unlock(node)
        self.allocator.free(own)
        yield
        self.allocator.allocate(len(own))
        for node in nodes:
            self.radix_cache.lock(node)

    def allocate(self, request: Request) -> None:
        """Give a free row to a request. The row begins with the longest cached prefix.

        The prefix may go on with copies on the host. They are copied to new pages of the row.
        """
        super().allocate(request)
        start = len(self.pages_of(request))
        copies = self.radix_cache.take_copies(
            self._cacheable_tokens(request), start, self.num_free_pages
        )
        request.num_computed_tokens += len(copies) * self.page_size
        self.allocate_slots(request, request.num_computed_tokens)
        self.radix_cache.load(copies, self.pages_of(request)[start:])

    def reset_prefix_cache(self) -> int:
        """Evict the pages that no request uses, and drop all copies. Return the number of pages."""
        num_host_pages = self.radix_cache.num_host_pages
        self.radix_cache.resize_host(0)  # so that nothing is backed up
        num_pages = super().reset_prefix_cache()
        self.radix_cache.resize_host(num_host_pages)
        return num_pages

    def check_invariants(self, running: list[Request], written: Mapping[Request, int]) -> None:
        super().check_invariants(running, written)
        self.radix_cache.check_host()
