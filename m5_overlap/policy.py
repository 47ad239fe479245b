"""`SchedulePolicy`: who of the waiting requests is admitted first. Plain Python data, no tensors.

    fcfs        first come, first served
    lpm         longest prefix match: whoever has most of its tokens cached, before they are evicted
    dfs-weight  the tree branch by branch, the one that most requests wait for first
    lof         longest output first
    random      by lot

An order by anything but age could keep a request waiting for ever. Upholds I5 by a bound: before a
request, at most those that waited when it came are admitted, and `MAX_OVERTAKING` more. One that is
due goes first, the oldest of them before all; a retracted one is due at once.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import islice

from common import EngineConfig, Request

from .kv_cache import KVCacheManager
from .radix_cache import TreeNode

MAX_OVERTAKING = 32
WINDOW = 128  # of those that wait, the oldest are compared: what a step costs must have a bound


class SchedulePolicy:
    """Puts waiting requests in order, and counts how long each has waited, in admissions."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager) -> None:
        self.kv_cache = kv_cache
        sorts: dict[str, Callable[[list[Request]], list[Request]]] = {
            "fcfs": list,
            "lpm": self._longest_prefix_first,
            "dfs-weight": self._branch_by_branch,
            "lof": self._longest_output_first,
            "random": self._shuffled,
        }
        self._sort = sorts[config.schedule_policy]
        self._random = random.Random(config.seed)
        self._num_admissions = 0
        self._due: dict[Request, int] = {}  # after so many admissions a waiting request goes first

    def on_arrival(self, request: Request, num_waiting: int) -> None:
        """A request starts to wait behind `num_waiting` others."""
        self._due[request] = self._num_admissions + num_waiting + MAX_OVERTAKING

    def on_retraction(self, request: Request) -> None:
        """A request that ran waits again."""
        self._due[request] = self._num_admissions

    def on_admission(self, request: Request) -> None:
        """A request no longer waits: it runs."""
        self._num_admissions += 1
        del self._due[request]

    def on_removal(self, request: Request) -> None:
        """A request is no longer there."""
        self._due.pop(request, None)

    def is_due(self, request: Request) -> bool:
        """Whether a request has been passed over often enough (I5)."""
        return self._due[request] <= self._num_admissions

    def order(self, waiting: Iterable[Request]) -> list[Request]:
        """The oldest of the waiting requests, which come in order of age, as they should go."""
        oldest = list(islice(waiting, WINDOW))
        due = [request for request in oldest if self.is_due(request)]
        return due + self._sort([request for request in oldest if not self.is_due(request)])

    def _longest_prefix_first(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda r: -self.kv_cache.find_prefix(r).num_pages)

    def _branch_by_branch(self, requests: list[Request]) -> list[Request]:
        """Depth first, so that a branch is served while it is cached; the heaviest branch first."""
        ending_at: dict[TreeNode, list[Request]] = defaultdict(list)
        weights: Counter[TreeNode] = Counter()
        for request in requests:
            node = self.kv_cache.find_prefix(request).node
            ending_at[node].append(request)
            weights.update(node.path())
        ordered, stack = [], [self.kv_cache.radix_cache.root]
        while stack:
            node = stack.pop()
            ordered += ending_at[node]
            waited_for = [child for child in node.children.values() if weights[child]]
            stack += sorted(waited_for, key=weights.__getitem__)
        return ordered

    def _longest_output_first(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda r: r.num_tokens - r.max_num_tokens)

    def _shuffled(self, requests: list[Request]) -> list[Request]:
        return self._random.sample(requests, len(requests))
