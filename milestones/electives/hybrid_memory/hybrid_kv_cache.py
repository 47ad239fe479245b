"""`HybridKVCacheManager`: the pages of each request in each group of layers. No tensors.

Each group has rows of its own in the page table. The rows of the first group are those of m5: they
name the blocks of a request. In a group with a window, a block that no coming query sees has no
page, and its entry is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from common import Request

from .hybrid_radix_cache import HybridRadixCache
from .kv_cache import PADDING_PAGE, KVCacheManager, PageTable
from .kv_groups import BlockAllocator, Groups


class HybridPageTable(PageTable):
    """The blocks of each row, and for each group with a window their pages."""

    def __init__(self, num_rows: int, allocator: BlockAllocator) -> None:
        super().__init__(num_rows)
        self.num_rows = num_rows
        self.allocator = allocator
        self.pages: list[list[list[int]]] = [[[] for _ in self.rows] for _ in allocator.windows]

    def append(self, row: int, pages: Sequence[int]) -> None:
        """Append blocks to a row, and use the pages that they have in the windows."""
        super().append(row, pages)
        for number, window in enumerate(self.allocator.windows):
            for block in pages:
                self.pages[number][row].append(PADDING_PAGE)
                if block in window.pages:
                    self._set(number, row, len(self.pages[number][row]) - 1, window.use(block))

    def slide(self, row: int, num_tokens: int, num_cached: int) -> None:
        """Release the pages that the query after `num_tokens` tokens does not see.

        The tree has the first `num_cached` blocks, and keeps their pages until it evicts them.
        """
        for number, window in enumerate(self.allocator.windows):
            pages, blocks = self.pages[number][row], self.rows[row]
            behind = range(window.first_block(num_tokens))
            for column in [c for c in behind if pages[c] != PADDING_PAGE]:
                self._set(number, row, column, PADDING_PAGE)
                if window.release(blocks[column]) and column >= num_cached:
                    self.allocator.drop(window, blocks[column])

    def replace(self, row: int, pages: Sequence[int]) -> list[int]:
        """Replace the first blocks of a row by those of the tree. Return those that left the row.

        In the windows, the row uses the page of the tree's block. If that block has lost its page,
        it gets the page of the block that leaves.
        """
        for number, window in enumerate(self.allocator.windows):
            for column, (ours, theirs) in enumerate(zip(self.rows[row], pages, strict=False)):
                if ours != theirs and self.pages[number][row][column] != PADDING_PAGE:
                    window.release(ours)
                    if theirs not in window.pages:
                        window.pages[theirs] = window.pages.pop(ours)
                    self._set(number, row, column, window.use(theirs))
        for states in self.allocator.states:
            states.replace(self.rows[row], pages)
        return super().replace(row, pages)

    def cut(self, row: int, length: int) -> list[int]:
        """Shorten a row to `length` blocks. Return those that were cut off; no window uses them."""
        for number, window in enumerate(self.allocator.windows):
            for block in self.in_use(number, row, length):
                window.release(block)
            del self.pages[number][row][length:]
        return super().cut(row, length)

    def in_use(self, number: int, row: int, start: int = 0) -> list[int]:
        """Return the blocks from `start` on that a row uses in a group with a window."""
        entries = zip(self.rows[row][start:], self.pages[number][row][start:], strict=True)
        return [block for block, page in entries if page != PADDING_PAGE]

    def _set(self, number: int, row: int, column: int, page: int) -> None:
        """Set an entry. The device has the rows of one group after those of the other."""
        self.updates.append(((number + 1) * self.num_rows + row, column, page))
        self.pages[number][row][column] = page


class HybridKVCacheManager(KVCacheManager):
    """I3: pages of all groups, free pages and the padding page partition the pool."""

    allocator: BlockAllocator
    table: HybridPageTable
    radix_cache: HybridRadixCache

    def __init__(
        self, num_rows: int, num_pages: int, page_size: int, groups: Groups, max_model_len: int
    ) -> None:
        super().__init__(num_rows, num_pages, page_size)
        self.max_model_len = max_model_len
        self.allocator = BlockAllocator(num_pages, page_size, groups)
        self.table = HybridPageTable(num_rows, self.allocator)
        self.radix_cache = HybridRadixCache(page_size, self.allocator)
        self.last_nodes = [self.radix_cache.root] * num_rows

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated: free pages, and cached pages that can be evicted."""
        return len(self.allocator.free_pages) + self.radix_cache.num_evictable_pages

    @cached_property
    def max_tokens(self) -> int:
        """The most tokens that one request can have in the pool.

        A group with a window may make room for more tokens than the pool has slots.
        """
        return self.allocator.max_tokens(self.max_model_len)

    def num_used_tokens(self, running: list[Request]) -> int:
        """Return the number of slots that are written in the pages in use, of all groups."""
        held = sum(len(self.pages_of(request)) * self.page_size for request in running)
        unwritten = held - sum(request.num_computed_tokens for request in running)
        return self.num_reserved_tokens - unwritten * self.allocator.pages_per_block

    def num_pages_of(self, request: Request) -> int:
        """Return the number of pages that a running request holds, in all groups."""
        assert request.row is not None, f"I3: {request} has no row"
        numbers = range(len(self.allocator.windows))
        in_windows = sum(len(self.table.in_use(number, request.row)) for number in numbers)
        return len(self.pages_of(request)) * self.allocator.has_full + in_windows

    def num_new_pages(self, requests: list[Request]) -> int:
        """Return how many pages the next token of each request needs: one of each group."""
        return super().num_new_pages(requests) * self.allocator.pages_per_block

    def available_slots(self, request: Request) -> int:
        """Return how many tokens a request could compute now, in its own and in free pages."""
        blocks = len(self.pages_of(request))
        blocks += self.num_free_pages // self.allocator.pages_per_block
        return blocks * self.page_size - request.num_computed_tokens

    def allocate(self, request: Request) -> None:
        """Give a free row to a request, with a cached prefix. Use only what its next query sees.

        Its state becomes a copy of the snapshot at the end of that prefix.
        """
        known = self.radix_cache.num_known_pages(self._cacheable_tokens(request))
        super().allocate(request)
        self.free_behind_windows(request)
        for states in self.allocator.states:
            states.start(request, self.pages_of(request), known)

    def allocate_slots(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks that are missing for the request's first `num_tokens` tokens.

        Cached pages are evicted if there are too few free pages.
        """
        missing = self.pages_for(num_tokens) - len(self.pages_of(request))
        short = missing * self.allocator.pages_per_block - len(self.allocator.free_pages)
        if short > 0:
            self.allocator.free(self.radix_cache.evict(short))
        super().allocate_slots(request, num_tokens)
        for states in self.allocator.states:
            if num_tokens % self.page_size == 0 and not states.free_slots:
                self.allocator.free(self.radix_cache.evict_snapshot())
            states.advance(request, num_tokens, self.pages_of(request)[-1])

    def chunk_end(self, request: Request, end: int) -> int:
        """Return where a chunk that could go to `end` must end, so that states can be resumed."""
        for states in self.allocator.states:
            end = states.chunk_end(request, end)
        return end

    def free_behind_windows(self, request: Request) -> None:
        """Give back the pages that the next query of a request does not see.

        Only finished steps count: a step in flight may be undone, and its queries see more tokens.
        """
        assert request.row is not None, f"I3: {request} has no row"
        num_cached = self.last_nodes[request.row].num_prefix_pages
        self.table.slide(request.row, request.num_computed_tokens, num_cached)
        for states in self.allocator.states:  # of its own snapshots, keep only the newest
            column = states.first_block(request.num_computed_tokens) - 1
            if column >= num_cached:
                states.drop(self.pages_of(request)[column])

    def free(self, request: Request) -> None:
        """Take back the row and the pages of a request. Blocks to resume from stay cached."""
        self.insert(request)
        node = self.last_nodes[request.row or 0]
        super().free(request)
        self.allocator.free(self.radix_cache.trim(node))

    def reset_prefix_cache(self) -> int:
        """Evict all pages that no request uses. Return their number."""
        before = len(self.allocator.free_pages)
        self.allocator.free(self.radix_cache.evict(self.radix_cache.num_evictable_pages))
        return len(self.allocator.free_pages) - before

    def check_invariants(self, running: list[Request], written: Mapping[Request, int]) -> None:
        """Raise `AssertionError` if a row or a page has no owner, or two owners.

        written: for each request, the tokens that steps in flight are computing.
        """
        allocator, rows = self.allocator, [r.row for r in running if r.row is not None]
        assert sorted([*rows, *self.free_rows]) == list(range(self.table.num_rows)), (
            f"I3: rows {rows} are taken, {self.free_rows} free"
        )
        blocks = [block for node in self.radix_cache.nodes() for block in node.pages]
        for row, request in zip(rows, running, strict=True):
            held = len(self.pages_of(request))
            needed = self.pages_for(request.num_computed_tokens + written[request])
            assert held == needed, f"I3: {request} holds {held} pages, its tokens need {needed}"
            prefix = self.last_nodes[row].prefix_pages()
            assert self.pages_of(request)[: len(prefix)] == prefix, f"I3: row {row} and the tree"
            blocks += self.pages_of(request)[len(prefix) :]
            for states in allocator.states:
                length = request.num_computed_tokens + written[request]
                assert states.lengths[row] == length, f"I1: the state of {request}"
            for pages, window in zip(self.table.pages, allocator.windows, strict=True):
                first = min(held, window.first_block(request.num_computed_tokens))
                seen = [window.pages[block] for block in self.pages_of(request)[first:]]
                assert pages[row] == [PADDING_PAGE] * first + seen, f"I3: window of {request}"
        assert len(blocks) == len(set(blocks)), "I3: a block has two owners"
        self.radix_cache.check_invariants(self.last_nodes[row] for row in rows)
        for number, window in enumerate(allocator.windows):
            uses = Counter(b for row in rows for b in self.table.in_use(number, row))
            assert uses == window.uses, f"I3: uses are {window.uses}, but rows have {uses}"
            assert window.pages.keys() <= {*blocks}, "I3: a block that is nowhere has a page"
        for states in allocator.states:
            states.check_invariants(blocks)
        self.radix_cache.check_leaves()
        owned = blocks if allocator.has_full else []
        owned += [page for window in allocator.windows for page in window.pages.values()]
        everything = sorted([PADDING_PAGE, *owned, *allocator.free_pages])
        assert everything == list(range(allocator.num_pages + 1)), (
            f"I3: pages in use or cached {sorted(owned)}, free {sorted(allocator.free_pages)} "
            f"and the padding page are not the {allocator.num_pages + 1} pages of the pool"
        )
