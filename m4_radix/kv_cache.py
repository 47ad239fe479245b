"""`KVCacheManager`: which page of the KV cache each request owns. Plain Python data, no tensors.

A request's tokens lie in pages of `page_size` tokens, in any order in memory. Its row of the page
table lists the pages: position p is in slot `table[p // page_size] * page_size + p % page_size`.

    row 0   A  | 7 | 2 | 9 |           pages   0  1  2  3  4  5  6  7  8  9
    row 1   B  | 7 | 4 |                       #  .  A  .  B  .  c  T  .  A      # padding, . free

A row begins with pages of the radix tree (T). Other rows may begin with the same pages. The pages
that follow are the request's own. The tree also keeps pages that no request uses now (c), until a
request needs their memory.
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
        self.free_pages = list(range(num_pages, 0, -1))  # a stack: low page ids are taken first

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. The caller has checked that this many pages are free."""
        assert count <= len(self.free_pages), f"I3: {count} pages of {len(self.free_pages)} free"
        return [self.free_pages.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        self.free_pages.extend(reversed(pages))


class PageTable:
    """The pages of each row, and the changes that the runner has not copied yet."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.updates: list[tuple[int, int, int]] = []  # (row, column, page), oldest first

    def append(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row."""
        for page in pages:
            self.updates.append((row, len(self.rows[row]), page))
            self.rows[row].append(page)

    def replace(self, row: int, pages: Sequence[int]) -> list[int]:
        """Replace the first pages of a row by `pages`. Return those that left the row."""
        replaced = []
        for column, (old, new) in enumerate(zip(self.rows[row], pages, strict=False)):
            if old != new:
                replaced.append(old)
                self.updates.append((row, column, new))
                self.rows[row][column] = new
        return replaced

    def cut(self, row: int, length: int) -> list[int]:
        """Shorten a row to `length` pages. Return the pages that were cut off."""
        rest = self.rows[row][length:]
        del self.rows[row][length:]
        return rest

    def take_updates(self) -> list[tuple[int, int, int]]:
        """Return the changes since the last call."""
        updates, self.updates = self.updates, []
        return updates


class KVCacheManager:
    """I3: pages of rows, of the tree, free pages and the padding page partition the pool."""

    def __init__(self, num_rows: int, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.table = PageTable(num_rows)
        self.radix_cache = RadixCache(page_size)
        # The node that ends the cached prefix of each row. The row has locked it. Without a prefix
        # it is the root.
        self.last_nodes = [self.radix_cache.root] * num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def has_free_row(self) -> bool:
        return bool(self.free_rows)

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated: free pages, and cached pages that can be evicted."""
        return len(self.allocator.free_pages) + self.radix_cache.evictable_size

    @property
    def max_tokens(self) -> int:
        """The most tokens that one request can have in the pool."""
        return self.allocator.num_pages * self.page_size

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the pages in use can hold. A page that rows share counts once."""
        return (self.allocator.num_pages - self.num_free_pages) * self.page_size

    def num_used_tokens(self, running: list[Request]) -> int:
        """Return the number of tokens that are written in the pages in use."""
        tokens = self.radix_cache.protected_size * self.page_size
        for request in running:
            tokens += request.num_computed_tokens - self.num_inserted_tokens(request)
        return tokens

    def num_inserted_tokens(self, request: Request) -> int:
        """Return how many of a running request's tokens are in the tree."""
        assert request.row is not None, f"I3: {request} has no row"
        return self.last_nodes[request.row].num_prefix_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def pages_of(self, request: Request) -> list[int]:
        """Return the pages of a request, in order of position. A waiting request has none."""
        return [] if request.row is None else self.table.rows[request.row]

    def available_slots(self, request: Request) -> int:
        """Return how many tokens a request could compute now, in its own and in free pages."""
        pages = len(self.pages_of(request)) + self.num_free_pages
        return pages * self.page_size - request.num_computed_tokens

    def cache_key(self, request: Request, num_tokens: int) -> list[int]:
        """Return what the keys and values of a request's first tokens depend on: these tokens."""
        return request.token_ids[:num_tokens]

    def find_prefix(self, request: Request) -> CachedPrefix:
        """Return the part of a waiting request's tokens that is cached now."""
        return self.radix_cache.find(self._cacheable_tokens(request))

    def allocate(self, request: Request) -> None:
        """Give a free row to a request. The row begins with the longest cached prefix.

        The prefix is locked as soon as it is found, so that it cannot be evicted in between.
        """
        assert self.has_free_row and request.row is None, f"I3: no row for {request}"
        row = request.row = self.free_rows.pop()
        node = self.radix_cache.match_prefix(self._cacheable_tokens(request))
        self.radix_cache.lock(node)
        self.last_nodes[row] = node
        self.table.append(row, node.prefix_pages())
        request.num_computed_tokens = node.num_prefix_pages * self.page_size

    def allocate_slots(self, request: Request, num_tokens: int) -> None:
        """Allocate the pages that are missing for the request's first `num_tokens` tokens.

        Cached pages are evicted if there are too few free pages.
        """
        assert request.row is not None, f"I3: {request} has no row"
        missing = self.pages_for(num_tokens) - len(self.table.rows[request.row])
        if missing > 0:
            short = max(0, missing - len(self.allocator.free_pages))
            self.allocator.free(self.radix_cache.evict(short))
            self.table.append(request.row, self.allocator.allocate(missing))

    def free_slots(self, request: Request, num_tokens: int) -> None:
        """Free the pages after the request's first `num_tokens` tokens."""
        assert request.row is not None, f"I3: {request} has no row"
        self.allocator.free(self.table.cut(request.row, self.pages_for(num_tokens)))

    def insert(self, request: Request) -> None:
        """Give the whole pages that a request has computed to the tree, and lock them.

            the row:  | T  T  T | d  d | n  n  n | p | r |

        T: the prefix that the row has locked stays. d: the tree got pages with the same tokens from
        another request meanwhile; they take the place of these pages, which become free. n: these
        pages go to the tree. p: the last page with computed tokens is not full, so it stays the
        request's own. r: a page for tokens that no step has computed is the request's own as well.

        Only tokens that a finished forward has written may be inserted.
        """
        assert request.row is not None, f"I3: {request} has no row"
        num_pages = request.num_computed_tokens // self.page_size
        key = self.cache_key(request, num_pages * self.page_size)
        node = self.radix_cache.insert(key, self.pages_of(request)[:num_pages])
        self.radix_cache.lock(node)
        self.radix_cache.unlock(self.last_nodes[request.row])
        self.last_nodes[request.row] = node
        self.allocator.free(self.table.replace(request.row, node.prefix_pages()))

    def free(self, request: Request) -> None:
        """Take back the row and the pages of a request. Its computed pages stay cached.

        In the drawing of `insert`: T, d and n belong to the tree afterwards. p and r become free.
        """
        assert request.row is not None, f"I3: {request} has no row to free"
        self.insert(request)
        node, self.last_nodes[request.row] = self.last_nodes[request.row], self.radix_cache.root
        self.radix_cache.unlock(node)
        self.allocator.free(self.table.cut(request.row, 0)[node.num_prefix_pages :])
        self.free_rows.append(request.row)
        request.row = None

    def reset_prefix_cache(self) -> int:
        """Evict all pages that no request uses. Return their number."""
        pages = self.radix_cache.evict(self.radix_cache.evictable_size)
        self.allocator.free(pages)
        return len(pages)

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if a row or a page has no owner, or two owners."""
        rows = [request.row for request in running if request.row is not None]
        assert sorted([*rows, *self.free_rows]) == list(range(len(self.table.rows))), (
            f"I3: rows {rows} are taken, {self.free_rows} free"
        )
        for request in running:
            held, needed = len(self.pages_of(request)), self.pages_for(request.num_computed_tokens)
            assert held == needed, f"I3: {request} holds {held} pages, its tokens need {needed}"
        self.radix_cache.check_invariants(self.last_nodes[row] for row in rows)
        owned = []
        for row in rows:
            pages, node = self.table.rows[row], self.last_nodes[row]
            shared = node.num_prefix_pages
            assert pages[:shared] == node.prefix_pages(), f"I3: row {row} differs from the tree"
            owned += pages[shared:]
        cached = [page for node in self.radix_cache.nodes() for page in node.pages]
        everything = sorted([PADDING_PAGE, *owned, *cached, *self.allocator.free_pages])
        assert everything == list(range(self.allocator.num_pages + 1)), (
            f"I3: owned {sorted(owned)}, cached {sorted(cached)}, free "
            f"{sorted(self.allocator.free_pages)} and the padding page are not the "
            f"{self.allocator.num_pages + 1} pages of the pool, each once"
        )

    def _cacheable_tokens(self, request: Request) -> list[int]:
        """Return the tokens that a cache can serve: whole pages, but never the last token.

        The last token must always be computed, because its logits give the next token (I1). If the
        log probabilities of the prompt are needed, all tokens must be computed: a cache has none.
        """
        if request.needs_prompt_logprobs:
            return []
        whole_pages = (request.num_tokens - 1) // self.page_size
        return self.cache_key(request, whole_pages * self.page_size)
