"""`PrefixIndex`: an approximate tree of the pages that each replica has cached.

A key names a page and all pages before it (`keys.py`), so a set of keys is a tree: the path to a
page is the sequence of keys of a prompt. For each page, the index stores the replicas that hold it.

The index is approximate. It learns a prefix when a request is sent, before the replica has computed
it, and it learns of evictions when the replica reports them. In between, it evicts as the replica
would: each replica has as many pages here as it has memory for, and the least recently used page is
evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .keys import PageKey

NO_REPLICAS: frozenset[str] = frozenset()


class PrefixIndex:
    """Which replicas hold which pages, with at most `capacity` pages for each replica."""

    def __init__(self) -> None:
        self._holders: dict[PageKey, set[str]] = {}
        self._pages: dict[str, OrderedDict[PageKey, None]] = {}  # the oldest use comes first
        self._capacity: dict[str, int] = {}

    def add(self, replica: str, capacity: int) -> None:
        """Add a replica without pages. Forget the pages of an older replica with this name."""
        self.remove(replica)
        self._pages[replica] = OrderedDict()
        self._capacity[replica] = capacity

    def remove(self, replica: str) -> None:
        """Forget a replica and its pages."""
        for key in self._pages.pop(replica, ()):
            self._release(key, replica)
        self._capacity.pop(replica, None)

    def clear(self, replica: str) -> None:
        """Forget the pages of a replica, and keep the replica."""
        self.add(replica, self._capacity[replica])

    def size(self, replica: str) -> int:
        """Return the number of pages that a replica is believed to hold."""
        return len(self._pages[replica])

    def keys(self, replica: str) -> frozenset[PageKey]:
        """Return the pages that a replica is believed to hold."""
        return frozenset(self._pages[replica])

    def matches(self, keys: Sequence[PageKey]) -> dict[str, int]:
        """Return the number of leading pages of a prompt that each replica holds.

        Replicas without the first page are left out.
        """
        found: dict[str, int] = {}
        alive: set[str] | frozenset[str] = NO_REPLICAS  # the replicas that have all pages so far
        for depth, key in enumerate(keys):
            holders = self._holders.get(key, NO_REPLICAS)
            still = alive & holders if depth else holders
            if len(still) < len(alive):
                found.update(dict.fromkeys(alive - still, depth))
            alive = still
            if not alive:
                break
        found.update(dict.fromkeys(alive, len(keys)))
        return found

    def insert(self, replica: str, keys: Sequence[PageKey]) -> None:
        """Note that a replica holds a prefix, or will hold it soon.

        The pages are used from the last one to the first one, so that a page is always older than
        the pages before it: the end of a prefix is evicted before its beginning.
        """
        pages, capacity = self._pages[replica], self._capacity[replica]
        for key in reversed(keys[:capacity]):
            if key not in pages:
                self._holders.setdefault(key, set()).add(replica)
                pages[key] = None
            pages.move_to_end(key)
        while len(pages) > capacity:
            oldest, _ = pages.popitem(last=False)
            self._release(oldest, replica)

    def evict(self, replica: str, keys: Iterable[PageKey]) -> None:
        """Note that a replica no longer holds these pages."""
        pages = self._pages[replica]
        for key in keys:
            if key in pages:
                del pages[key]
                self._release(key, replica)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the two views of the index differ, or if it is too large."""
        pairs = {(key, name) for name, pages in self._pages.items() for key in pages}
        assert pairs == {(key, name) for key, held in self._holders.items() for name in held}, (
            "a page and its holders disagree"
        )
        assert all(self._holders.values()), "a page without holders was kept"
        assert all(len(pages) <= self._capacity[name] for name, pages in self._pages.items()), (
            "a replica has more pages than its capacity"
        )

    def _release(self, key: PageKey, replica: str) -> None:
        holders = self._holders[key]
        holders.discard(replica)
        if not holders:
            del self._holders[key]
