"""`SimulatedReplica`: an engine with a prefix cache, in virtual time and without a model.

A step model gives the seconds of a decode step and of a prefill. The cache has pages, locks and LRU
eviction, as m4 and m5. A prefill stops the decodes of its replica, which costs the same time as a
mixed batch in several chunks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from .prefix_index import CacheReport, PageKey
from .steps import StepModel


@dataclass(eq=False)
class SimulatedRequest:
    """A request of the simulator.

    keys: of the whole pages of the prompt. all_keys: of the prompt and the output. num_tokens: the
    tokens of the prompt. Times are in seconds of virtual time.
    """

    keys: list[PageKey]
    all_keys: list[PageKey]
    num_tokens: int
    num_output: int
    arrival: float
    session: int = 0
    num_cached_pages: int = 0
    first_token: float = 0.0
    private_pages: int = 0
    locked: list[PageKey] = field(default_factory=list)


class PageCache:
    """The pages of a replica: free, private to a request, locked, or evictable.

    Locked pages are cached, and running requests use them. An evictable page is older than the
    pages before it, so the end of a prefix is evicted first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_free = num_pages
        self._locks: dict[PageKey, int] = {}
        self._evictable: OrderedDict[PageKey, None] = OrderedDict()
        self.inserted: dict[PageKey, bool] = {}  # changes since the last report: True if inserted

    def match(self, keys: list[PageKey]) -> int:
        """Return the number of leading pages that are cached."""
        for depth, key in enumerate(keys):
            if key not in self._locks and key not in self._evictable:
                return depth
        return len(keys)

    def admit(self, request: SimulatedRequest, page_size: int) -> bool:
        """Lock the cached prefix and take pages for the rest. False: too few are free.

        The last token of a prompt is always computed, so a page that ends with it is no hit.
        """
        usable = request.keys[: (request.num_tokens - 1) // page_size]
        hits = self.match(usable)
        total = -(-(request.num_tokens + request.num_output) // page_size)
        newly_locked = sum(key in self._evictable for key in usable[:hits])
        if total - hits > self.num_free + len(self._evictable) - newly_locked:
            return False
        request.num_cached_pages, request.private_pages = hits, total - hits
        self._lock(request, usable[:hits])
        while self.num_free < request.private_pages:
            evicted, _ = self._evictable.popitem(last=False)
            self.inserted[evicted] = False
            self.num_free += 1
        self.num_free -= request.private_pages
        self._adopt(request, request.keys[hits:])
        return True

    def finish(self, request: SimulatedRequest) -> None:
        """Add the output to the cache, unlock all pages and free those that are not cached."""
        self._adopt(request, request.all_keys[len(request.keys) :])
        self.num_free += request.private_pages
        for key in reversed(request.locked):
            self._locks[key] -= 1
            if not self._locks[key]:
                del self._locks[key]
                self._evictable[key] = None

    def changes(self) -> tuple[tuple[PageKey, ...], tuple[PageKey, ...]]:
        """Return the pages that were inserted and evicted since the last call."""
        changed, self.inserted = self.inserted, {}
        inserted = tuple(key for key, is_cached in changed.items() if is_cached)
        return inserted, tuple(key for key, is_cached in changed.items() if not is_cached)

    def _adopt(self, request: SimulatedRequest, keys: list[PageKey]) -> None:
        """Move pages of a request to the cache, locked. Pages that the cache has stay private."""
        for key in keys:
            if key not in self._locks and key not in self._evictable:
                request.private_pages -= 1
                self.inserted.pop(key, None)
                self.inserted[key] = True
        self._lock(request, keys)

    def _lock(self, request: SimulatedRequest, keys: list[PageKey]) -> None:
        for key in keys:
            self._evictable.pop(key, None)
            self._locks[key] = self._locks.get(key, 0) + 1
        request.locked += keys


class SimulatedReplica:
    """Admits requests in order, prefills them one at a time, and decodes all others together."""

    def __init__(
        self, name: str, model: StepModel, num_pages: int, page_size: int, max_num_seqs: int
    ) -> None:
        self.name = name
        self.cache = PageCache(num_pages)
        self.num_reports = 0
        self._model = model
        self._page_size = page_size
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: SimulatedRequest | None = None
        self._decoding: list[tuple[float, int, SimulatedRequest]] = []  # by the step of their end
        self._steps = 0.0  # decode steps so far
        self._now = 0.0
        self._prefill_end = 0.0
        self._admitted = 0

    def add(self, request: SimulatedRequest, now: float) -> None:
        """Queue a request."""
        self._advance(now)
        self._waiting.append(request)
        self._admit(now)

    def next_event(self) -> float | None:
        """Return the time of the next end of a prefill or of a request; None if idle."""
        if self._prefilling is not None:
            return self._prefill_end
        if not self._decoding:
            return None
        left = max(0.0, self._decoding[0][0] - self._steps)
        return self._now + left * self._model.decode_seconds(len(self._decoding))

    def run_event(self, now: float) -> list[SimulatedRequest]:
        """Process the event that is due, and return the requests that ended."""
        self._advance(now)
        if (request := self._prefilling) is not None:
            self._prefilling = None
            request.first_token = now
            self._admitted += 1
            end = self._steps + request.num_output - 1
            heapq.heappush(self._decoding, (end, self._admitted, request))
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps + 1e-6:
            ended.append(heapq.heappop(self._decoding)[2])
            self.cache.finish(ended[-1])
        self._admit(now)
        return ended

    def report(self) -> CacheReport:
        """Return the changes of the cache since the last report."""
        self.num_reports += 1
        inserted, evicted = self.cache.changes()
        return CacheReport(self.num_reports, self.num_reports - 1, inserted, evicted)

    def _advance(self, now: float) -> None:
        if self._prefilling is None and self._decoding:
            self._steps += (now - self._now) / self._model.decode_seconds(len(self._decoding))
        self._now = now

    def _admit(self, now: float) -> None:
        if self._prefilling is not None or not self._waiting:
            return
        if len(self._decoding) >= self._max_num_seqs:
            return
        request = self._waiting[0]
        if not self.cache.admit(request, self._page_size):
            assert self._decoding, "a request does not fit an empty replica"
            return
        self._waiting.popleft()
        self._prefilling = request
        computed = request.num_tokens - request.num_cached_pages * self._page_size
        self._prefill_end = now + self._model.prefill_seconds(computed)
