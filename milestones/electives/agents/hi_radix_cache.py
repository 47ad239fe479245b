"""`HiRadixCache`: pages of paused conversations are evicted last. Plain Python data, no tensors.

    evicted     released ── least recently used ── ... ── protected: back latest ── ... ── back next
                first                                                                         last

A protected page is still evictable, so it never keeps a request waiting (I5). When no other page is
left, the conversation that returns latest is *demoted*: its pages go to the host, and there its
copies are dropped after all others.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from .priority_hi_radix_cache import HiRadixCache as PriorityHiRadixCache
from .priority_hi_radix_cache import SwapCosts, Transfer, page_keys
from .radix_cache import TreeNode

__all__ = ["HiRadixCache", "Pause", "SwapCosts", "Transfer", "page_keys"]

SMALL_HEAP = 64  # entries: a heap is searched for old ones when it is larger, and has doubled
RELEASED = 0  # as `last_used` of a node: no other node was used as long ago


@dataclass(eq=False)
class Pause:
    """A paused conversation: where its prefix is, and when it is needed again."""

    node: TreeNode | None  # the end of the protected prefix; None after it was demoted
    returns_at: float  # infinite if nothing says when
    protected_until: float
    keys: list[bytes]  # of the copies, after it was demoted
    is_timed: bool = False  # it has an entry among the ends


def _lateness(pause: Pause) -> tuple[float, int]:
    """Return a larger value for a later return; of equal ones, for the least recently used."""
    assert pause.node is not None
    return pause.returns_at, -pause.node.last_used


class HiRadixCache(PriorityHiRadixCache):
    """Knows the paused conversations. A page that none of them needs is evicted before theirs."""

    def __init__(self, page_size: int, num_host_pages: int = 0) -> None:
        super().__init__(page_size, num_host_pages)
        self.pauses: dict[str, Pause] = {}  # by the id of the conversation
        self.protections = Counter[TreeNode]()  # of each node at the end of a protected prefix
        self.ends: list[tuple[float, int, str, Pause]] = []  # a heap; some pauses may have ended
        self.numbers = count()  # of entries of `ends` with equal times
        self.largest_heap = SMALL_HEAP  # entries that `_heap` may have
        self.now: Callable[[], float] = lambda: -math.inf  # `Conversations` replaces it
        self.num_demoted = 0  # conversations

    def protect(self, session_id: str, node: TreeNode, returns_at: float, until: float) -> None:
        """Evict a prefix after all that are not protected, until this time."""
        if node is not self.root:
            self.pauses[session_id] = Pause(node, returns_at, until, [])
            self.protections[node] += 1

    def expect(self, session_id: str, returns_at: float) -> None:
        """Change the time at which a paused conversation needs its prefix."""
        if pause := self.pauses.get(session_id):
            pause.returns_at = returns_at

    def end_pause(self, session_id: str) -> None:
        """End the protection of a conversation. What its next call does not use is released."""
        pause = self.pauses.pop(session_id, None)
        if pause is not None and (node := self._unprotect(pause)) is not None:
            self.release(node)

    def release(self, node: TreeNode) -> None:
        """Evict the end of a prefix before all others, up to where another one needs it."""
        for part in reversed(node.path()):
            is_shared = len(part.children) > (part is not node)
            if is_shared or part.lock_count > 0 or part in self.protections:
                break
            part.last_used = RELEASED
            part.in_heap = False  # its entry is out of date
            self._offer(part)

    def evict(self, num_pages: int) -> list[int]:
        """Remove pages from the ends of unlocked leaves, and those of paused conversations last."""
        assert num_pages <= self.evictable_size, f"I3: only {self.evictable_size} are evictable"
        self._end_old_protections()
        taken: list[int] = []
        while len(taken) < num_pages:
            if not self._heap:  # only protected pages are left
                self._demote_latest()
                continue
            entered, _number, leaf = heapq.heappop(self._heap)
            leaf.in_heap = False
            if self._is_evictable(leaf) and leaf.last_used == entered:
                taken += self._shorten(leaf, num_pages - len(taken))
            self._offer(leaf)
        self.evictable_size -= len(taken)
        return taken

    def back_up(self, node: TreeNode) -> None:
        """Copy the pages of a prefix that have no copy to the host, if that is worth its time.

        A released prefix gets no copy. A full host pool drops copies that are needed later, but
        none of this prefix, and none that is needed sooner.
        """
        if node.last_used == RELEASED:
            return
        tokens = [token for part in node.path() for token in part.tokens]
        pages = dict(zip(page_keys(tokens, self.page_size), node.prefix_pages(), strict=True))
        missing = [key for key in pages if key not in self.copies]
        self._touch(pages)
        needed = self._needed_at()
        others = [key for key in reversed(self.copies) if key not in pages]
        others.sort(key=lambda key: needed.get(key, math.inf))  # of equal ones: the oldest last
        for key in missing if self.costs.is_copy_cheaper(num_copies=2) else []:
            if not self.free_host_pages:
                if not others or needed.get(others[-1], math.inf) < needed.get(key, math.inf):
                    break
                self.free_host_pages.append(self.copies.pop(others.pop()))
            self.copies[key] = self.free_host_pages.pop()
            self.transfers.append(Transfer(pages[key], self.copies[key], to_host=True))
            self.num_written += 1
        self._touch(pages)

    def _needed_at(self) -> dict[bytes, float]:
        """Return when each copy of a demoted conversation is needed; the soonest time counts."""
        latest_first = sorted(self.pauses.values(), key=lambda pause: -pause.returns_at)
        return {key: pause.returns_at for pause in latest_first for key in pause.keys}

    def _demote_latest(self) -> None:
        """Let the pages of the conversation that returns latest be evicted. It keeps its copies."""
        latest = max(filter(self._holds_pages, self.pauses.values()), key=_lateness)
        assert latest.node is not None
        tokens = [token for part in latest.node.path() for token in part.tokens]
        latest.keys = page_keys(tokens, self.page_size)
        self._unprotect(latest)
        self.num_demoted += 1

    def _end_old_protections(self) -> None:
        """End protections that are too old. Each `evict` calls this, so it looks at few pauses."""
        for session_id, pause in reversed(self.pauses.items()):  # the newest first
            if pause.is_timed:
                break
            pause.is_timed = True
            entry = pause.protected_until, next(self.numbers), session_id, pause
            heapq.heappush(self.ends, entry)
        now = self.now()
        while self.ends and self.ends[0][0] <= now:
            *_, session_id, pause = heapq.heappop(self.ends)
            if self.pauses.get(session_id) is pause:
                del self.pauses[session_id]
                self._unprotect(pause)
        if len(self.ends) > SMALL_HEAP + 2 * len(self.pauses):
            self.ends = [end for end in self.ends if self.pauses.get(end[2]) is end[3]]
            heapq.heapify(self.ends)

    def _unprotect(self, pause: Pause) -> TreeNode | None:
        """Let a conversation's pages be evicted as all others. Return the end of its prefix."""
        node, pause.node = pause.node, None
        if node is not None:
            self.protections[node] -= 1
            if not self.protections[node]:
                del self.protections[node]
            self._offer(node)
        return node

    def _holds_pages(self, pause: Pause) -> bool:
        """Return whether pages could be evicted if this conversation were not protected."""
        return pause.node is not None and super()._is_evictable(pause.node)

    def _is_evictable(self, node: TreeNode) -> bool:
        return super()._is_evictable(node) and node not in self.protections

    def _offer(self, node: TreeNode) -> None:
        """Enter a node as before. A released one enters again: drop old entries now and then."""
        super()._offer(node)
        if len(self._heap) > self.largest_heap:
            newest = {entry[2]: entry for entry in sorted(self._heap, key=lambda entry: entry[1])}
            self._heap = list(newest.values())
            heapq.heapify(self._heap)
            self.largest_heap = SMALL_HEAP + 2 * len(self._heap)
