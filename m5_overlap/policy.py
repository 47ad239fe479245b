"""`SchedulePolicy`: the order in which waiting requests join. Plain Python data, no tensors.

    fcfs        first come, first served
    lpm         longest prefix match: the request with the most cached tokens, before their eviction
    dfs-weight  depth first through the radix tree, branches before their node, the heaviest first
    lof         longest output first
    random      a random order

Only the order of age is fair by itself: with any other order, a request could wait for ever.
Upholds I5 by a bound. Before a request is admitted, the scheduler admits at most the requests that
waited when it arrived, and `MAX_OVERTAKING` more. After that the request is due. Due requests come
before all others, the oldest first. A retracted request is due at once.
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
WINDOW = 128  # compare only the oldest waiting requests, so that the cost of a step is bounded


class SchedulePolicy:
    """Orders the waiting requests, and counts how many admissions each of them has waited for."""

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
        self._due: dict[Request, int] = {}  # the number of admissions after which a request is due

    def on_arrival(self, request: Request, num_waiting: int) -> None:
        """Note that a request starts to wait behind `num_waiting` others."""
        self._due[request] = self._num_admissions + num_waiting + MAX_OVERTAKING

    def on_retraction(self, request: Request) -> None:
        """Note that a running request has lost its memory and waits again."""
        self._due[request] = self._num_admissions

    def on_admission(self, request: Request) -> None:
        """Note that a waiting request runs now."""
        self._num_admissions += 1
        del self._due[request]

    def on_removal(self, request: Request) -> None:
        """Note that a request has finished or was aborted."""
        self._due.pop(request, None)

    def is_due(self, request: Request) -> bool:
        """Return whether enough other requests have overtaken this one (I5)."""
        return self._due[request] <= self._num_admissions

    def order(self, waiting: Iterable[Request]) -> list[Request]:
        """Return the oldest waiting requests in the order in which they should join.

        waiting: in order of age.
        """
        oldest = list(islice(waiting, WINDOW))
        due = [request for request in oldest if self.is_due(request)]
        return due + self._sort([request for request in oldest if not self.is_due(request)])

    def _longest_prefix_first(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda r: -self.kv_cache.find_prefix(r).num_pages)

    def _branch_by_branch(self, requests: list[Request]) -> list[Request]:
        """Walk the tree depth first, so that a branch is used while it is cached.

        Branches come before the requests that end at their node: these use nothing of a branch, and
        what they compute would evict it. Of two branches, the one that more requests wait for comes
        first.
        """
        ending_at: dict[TreeNode, list[Request]] = defaultdict(list)
        weights: Counter[TreeNode] = Counter()
        for request in requests:
            node = self.kv_cache.find_prefix(request).node
            ending_at[node].append(request)
            weights.update(node.path())
        nodes, stack = [], [self.kv_cache.radix_cache.root]  # `nodes`: last to first
        while stack:
            nodes.append(node := stack.pop())
            waited_for = [child for child in node.children.values() if weights[child]]
            stack += sorted(waited_for, key=weights.__getitem__, reverse=True)
        return [request for node in reversed(nodes) for request in ending_at[node]]

    def _longest_output_first(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda r: r.num_tokens - r.max_num_tokens)

    def _shuffled(self, requests: list[Request]) -> list[Request]:
        return self._random.sample(requests, len(requests))
