"""Which pages each replica has cached: keys of pages, the router's index, and replicas' reports.

A key is a number that names a page of tokens together with all tokens before it. A replica caches
whole pages, so a router that counts in pages predicts a hit exactly. Two prompts have the same
first k keys if and only if their first k pages have the same tokens (up to collisions of a 64-bit
hash). vLLM names its blocks in the same way. A set of keys is a tree: the path to a page is the
sequence of keys of a prompt.

The index is approximate. It learns a prefix when a request is sent, before the replica has computed
it, and it learns of evictions when the replica reports them. In between, it evicts as the replica
would: each replica has as many pages here as it has memory for, and the least recently used page is
evicted first.

A replica does not know which reports a router has received: answers are cancelled, and there may be
several routers. So a router says with each request which report it has, and the answer ends with a
report of all changes since then.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

PageKey = int  # 64 bits
NO_REPLICAS: frozenset[str] = frozenset()
CHANGES_KEPT = 64  # a router that is further behind gets the whole state


def page_keys(token_ids: Sequence[int], page_size: int, parent: PageKey = 0) -> list[PageKey]:
    """Return the key of each whole page of `token_ids`.

    parent: the key of the page before the first one; 0 at the start of a prompt. Keys are the same
    in every process.
    """
    keys, layout = [], struct.Struct(f"<Q{page_size}Q")
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = layout.pack(parent, *token_ids[start : start + page_size])
        parent = int.from_bytes(blake2b(page, digest_size=8).digest(), "little")
        keys.append(parent)
    return keys


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


@dataclass(frozen=True)
class CacheReport:
    """The changes of a cache from report `after` up to report `number`.

    after: None if `inserted` is the whole state. A page comes after the pages before it.
    """

    number: int
    after: int | None
    inserted: tuple[PageKey, ...]
    evicted: tuple[PageKey, ...] = ()


class CacheLog:
    """Turns states of a cache into reports of what changed. One thread calls it."""

    def __init__(self) -> None:
        self.number = 0  # of the newest change
        self._state: dict[PageKey, None] = {}
        self._changes: deque[tuple[int, list[PageKey], list[PageKey]]] = deque(maxlen=CHANGES_KEPT)

    def update(self, state: Iterable[PageKey]) -> None:
        """Note the pages that the cache has now, each after the pages before it."""
        now = dict.fromkeys(state)
        inserted = [key for key in now if key not in self._state]
        evicted = [key for key in self._state if key not in now]
        self._state = now
        if inserted or evicted:
            self.number += 1
            self._changes.append((self.number, inserted, evicted))

    def since(self, number: int) -> CacheReport:
        """Return the changes after a report; the whole state if some are no longer kept."""
        if number > self.number or self.number - number > len(self._changes):
            return CacheReport(self.number, None, tuple(self._state))
        changed: dict[PageKey, bool] = {}
        for change, inserted, evicted in self._changes:
            if change > number:
                changed.update(dict.fromkeys(inserted, True))
                changed.update(dict.fromkeys(evicted, False))
        return CacheReport(
            self.number,
            number,
            tuple(key for key in self._state if changed.get(key)),
            tuple(key for key, is_cached in changed.items() if not is_cached),
        )
