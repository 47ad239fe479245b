"""`KVCacheManager`: which page of the KV cache belongs to whom. Plain Python data, no tensors.

A request's tokens lie in pages of `page_size` tokens, in any order in memory. Its row of the page
table says where: position p is in slot `table[p // page_size] * page_size + p % page_size`.

    row 0   A  | 7 | 2 | 9 |           pages   0  1  2  3  4  5  6  7  8  9
    row 1   B  | 7 | 4 |                       #  .  A  .  B  .  c  T  .  A      # padding, . free

A row begins with pages of the radix tree (T), which other rows may begin with too; what follows is
the request's own. The tree also keeps pages that nobody uses now (c), until others need them.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import Request

from .radix_cache import CachedPrefix, RadixCache

PADDING_PAGE = 0  # never allocated: positions that belong to no request are written there


class PageAllocator:
    """The free list. Pages are numbered from 1; page 0 is the padding page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages, 0, -1))  # a stack: low pages go first

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has made sure that they are there."""
        assert count <= len(self.free_pages), f"I3: {count} pages of {len(self.free_pages)} free"
        return [self.free_pages.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        self.free_pages.extend(reversed(pages))


class PageTable:
    """The pages of each row, and what changed in them since the runner last looked."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.updates: list[tuple[int, int, int]] = []  # (row, column, page), oldest first

    def append(self, row: int, pages: Sequence[int]) -> None:
        """Add pages to the end of a row."""
        for page in pages:
            self.updates.append((row, len(self.rows[row]), page))
            self.rows[row].append(page)

    def replace(self, row: int, pages: Sequence[int]) -> list[int]:
        """Begin a row with other pages; returns those that are no longer in it."""
        replaced = []
        for column, (old, new) in enumerate(zip(self.rows[row], pages, strict=False)):
            if old != new:
                replaced.append(old)
                self.updates.append((row, column, new))
                self.rows[row][column] = new
        return replaced

    def cut(self, row: int, length: int) -> list[int]:
        """Shorten a row to `length` pages; returns those cut off."""
        rest = self.rows[row][length:]
        del self.rows[row][length:]
        return rest

    def take_updates(self) -> list[tuple[int, int, int]]:
        """The changes since the last call."""
        updates, self.updates = self.updates, []
        return updates


class KVCacheManager:
    """I3: the pages of the rows, of the tree, the free and the padding page partition the pool."""

    def __init__(self, num_rows: int, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.table = PageTable(num_rows)
        self.radix_cache = RadixCache(page_size)
        # The prefix that each row begins with and has locked; the root, an empty one, if no other.
        self.prefixes = [self.radix_cache.root] * num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def has_free_row(self) -> bool:
        return bool(self.free_rows)

    @property
    def num_free_pages(self) -> int:
        """Pages that can be had: those that are free, and those that the tree would give up."""
        return len(self.allocator.free_pages) + self.radix_cache.evictable_size

    @property
    def num_reserved_tokens(self) -> int:
        """What the pages that are held could hold. A page that rows share counts once."""
        return (self.allocator.num_pages - self.num_free_pages) * self.page_size

    def num_used_tokens(self, running: list[Request]) -> int:
        """Tokens written in the pages that are held."""
        tokens = self.radix_cache.protected_size * self.page_size
        for request in running:
            tokens += request.num_computed_tokens - self.num_inserted_tokens(request)
        return tokens

    def num_inserted_tokens(self, request: Request) -> int:
        """How many of a running request's tokens the tree has."""
        assert request.row is not None, f"I3: {request} has no row"
        return self.prefixes[request.row].end * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_size)

    def pages_of(self, request: Request) -> list[int]:
        """The pages a request holds, in order of its positions."""
        return [] if request.row is None else self.table.rows[request.row]

    def room(self, request: Request) -> int:
        """Tokens that a request could compute now, in its own pages and the free ones."""
        pages = len(self.pages_of(request)) + self.num_free_pages
        return pages * self.page_size - request.num_computed_tokens

    def find_prefix(self, request: Request) -> CachedPrefix:
        """What of a waiting request's tokens is cached now."""
        return self.radix_cache.find(self._cacheable_tokens(request))

    def allocate(self, request: Request) -> None:
        """Give a request a free row, which begins with the longest cached prefix of its tokens.

        It is locked the moment it is found: nobody can evict it in between.
        """
        assert self.has_free_row and request.row is None, f"I3: no row for {request}"
        row = request.row = self.free_rows.pop()
        prefix = self.radix_cache.match_prefix(self._cacheable_tokens(request))
        self.radix_cache.lock(prefix)
        self.prefixes[row] = prefix
        self.table.append(row, prefix.prefix_pages())
        request.num_computed_tokens = prefix.end * self.page_size

    def hold(self, request: Request, num_tokens: int) -> None:
        """Let a request hold the pages that `num_tokens` tokens take, no more and no fewer."""
        assert request.row is not None, f"I3: {request} has no row"
        missing = self.pages_for(num_tokens) - len(self.pages_of(request))
        if missing > 0:
            short = max(0, missing - len(self.allocator.free_pages))
            self.allocator.free(self.radix_cache.evict(short))
            self.table.append(request.row, self.allocator.allocate(missing))
        else:
            self.allocator.free(self.table.cut(request.row, self.pages_for(num_tokens)))

    def insert(self, request: Request) -> None:
        """Hand the tree the whole pages that a request has computed, and lock them.

        The request adopts the pages that the tree has already, and its own of the same tokens are
        free. Only what a finished forward has written may be inserted.
        """
        assert request.row is not None, f"I3: {request} has no row"
        num_pages = request.num_computed_tokens // self.page_size
        tokens = request.token_ids[: num_pages * self.page_size]
        prefix = self.radix_cache.insert(tokens, self.pages_of(request)[:num_pages])
        self.radix_cache.lock(prefix)
        self.radix_cache.unlock(self.prefixes[request.row])
        self.prefixes[request.row] = prefix
        self.allocator.free(self.table.replace(request.row, prefix.prefix_pages()))

    def free(self, request: Request) -> None:
        """Take back a request's row and pages. What it has computed stays cached."""
        assert request.row is not None, f"I3: {request} has no row to free"
        self.insert(request)
        prefix, self.prefixes[request.row] = self.prefixes[request.row], self.radix_cache.root
        self.radix_cache.unlock(prefix)
        self.allocator.free(self.table.cut(request.row, 0)[prefix.end :])
        self.free_rows.append(request.row)
        request.row = None

    def check_invariants(self, running: list[Request]) -> None:
        rows = [request.row for request in running if request.row is not None]
        assert sorted([*rows, *self.free_rows]) == list(range(len(self.table.rows))), (
            f"I3: rows {rows} are taken, {self.free_rows} free"
        )
        for request in running:
            held, needed = len(self.pages_of(request)), self.pages_for(request.num_computed_tokens)
            assert held == needed, f"I3: {request} holds {held} pages, its tokens need {needed}"
        self.radix_cache.check_invariants(self.prefixes[row] for row in rows)
        owned = []
        for row in rows:
            pages, prefix = self.table.rows[row], self.prefixes[row]
            assert pages[: prefix.end] == prefix.prefix_pages(), f"I3: row {row} left the tree"
            owned += pages[prefix.end :]
        cached = [page for node in self.radix_cache.nodes() for page in node.pages]
        everything = sorted([PADDING_PAGE, *owned, *cached, *self.allocator.free_pages])
        assert everything == list(range(self.allocator.num_pages + 1)), (
            f"I3: owned {sorted(owned)}, cached {sorted(cached)}, free "
            f"{sorted(self.allocator.free_pages)} and the padding page are not the "
            f"{self.allocator.num_pages + 1} pages of the pool, each once"
        )

    def _cacheable_tokens(self, request: Request) -> list[int]:
        """The tokens that need not be computed if they are cached: whole pages, and never the last
        token, since only computing it yields the next one (I1)."""
        whole_pages = (request.num_tokens - 1) // self.page_size
        return request.token_ids[: whole_pages * self.page_size]
