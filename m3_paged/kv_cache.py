"""`KVCacheManager`: which page of the KV cache each request owns. Plain Python data, no tensors.

A request's tokens lie in pages of `page_size` tokens, in any order in memory. Its row of the page
table lists the pages: position p is in slot `table[p // page_size] * page_size + p % page_size`.

    row 0   A  | 7 | 2 | 9 |           pages   0  1  2  3  4  5  6  7  8  9
    row 1   B  | 4 |                           #  .  A  .  B  .  .  A  .  A      # padding, . free
"""

from __future__ import annotations

from collections.abc import Sequence

from common import Request

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
    """I3: the pages of the rows, the free pages and the padding page partition the pool."""

    def __init__(self, num_rows: int, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.table = PageTable(num_rows)
        self.free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def has_free_row(self) -> bool:
        return bool(self.free_rows)

    @property
    def num_free_pages(self) -> int:
        return len(self.allocator.free_pages)

    @property
    def max_tokens(self) -> int:
        """The most tokens that one request can have in the pool."""
        return self.allocator.num_pages * self.page_size

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the allocated pages can hold."""
        return sum(map(len, self.table.rows)) * self.page_size

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

    def allocate(self, request: Request) -> None:
        """Give the first free row to a request."""
        assert self.has_free_row and request.row is None, f"I3: no row for {request}"
        request.row = self.free_rows.pop()

    def allocate_slots(self, request: Request, num_tokens: int) -> None:
        """Allocate the pages that are missing for the request's first `num_tokens` tokens."""
        assert request.row is not None, f"I3: {request} has no row"
        missing = self.pages_for(num_tokens) - len(self.table.rows[request.row])
        if missing > 0:
            self.table.append(request.row, self.allocator.allocate(missing))

    def free_slots(self, request: Request, num_tokens: int) -> None:
        """Free the pages after the request's first `num_tokens` tokens."""
        assert request.row is not None, f"I3: {request} has no row"
        self.allocator.free(self.table.cut(request.row, self.pages_for(num_tokens)))

    def free(self, request: Request) -> None:
        """Take back the row and all pages of a request."""
        assert request.row is not None, f"I3: {request} has no row to free"
        self.free_slots(request, 0)
        self.free_rows.append(request.row)
        request.row = None

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if a row or a page has no owner, or two owners."""
        rows = [request.row for request in running if request.row is not None]
        assert sorted([*rows, *self.free_rows]) == list(range(len(self.table.rows))), (
            f"I3: rows {rows} are taken, {self.free_rows} free"
        )
        for request in running:
            held, needed = len(self.pages_of(request)), self.pages_for(request.num_computed_tokens)
            assert held == needed, f"I3: {request} holds {held} pages, its tokens need {needed}"
        owned = [page for row in self.table.rows for page in row]
        everything = sorted([PADDING_PAGE, *owned, *self.allocator.free_pages])
        assert everything == list(range(self.allocator.num_pages + 1)), (
            f"I3: owned {sorted(owned)}, free {sorted(self.allocator.free_pages)} and the padding "
            f"page are not the {self.allocator.num_pages + 1} pages of the pool, each once"
        )
