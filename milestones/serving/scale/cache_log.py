"""`CacheLog`: the inserts and evictions of a replica's prefix cache, numbered for the routers.

A replica does not know which reports a router has received: answers are cancelled, and there may be
several routers. So a router says with each request which report it has, and the answer ends with a
report of all changes since then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .keys import PageKey

CHANGES_KEPT = 64  # a router that is further behind gets the whole state


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
