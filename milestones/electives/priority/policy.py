"""`SchedulePolicy`: the order in which waiting requests join. Plain Python data, no tensors.

    fcfs        first come, first served
    lpm         longest prefix match: the request with the most cached tokens, before their eviction
    dfs-weight  depth first through the radix tree; the branch that most requests wait for is first
    lof         longest output first
    random      a random order

Only the order of age is fair by itself: with any other order, a request could wait for ever.
More urgent requests come first; the policy orders requests of equal priority.

Upholds I5 by a bound. Before a request is admitted, the scheduler admits at most the requests that
waited when it arrived, and `MAX_OVERTAKING` more. After that the request is due. Due requests come
before others of their priority, the oldest first. A retracted request is due at once. The same
bound holds for all waits of a request together, also after preemptions. When it is reached, the
request has aged: it comes before all others, and nothing preempts it any more.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from common import EngineConfig, Request

from .kv_cache import KVCacheManager
from .radix_cache import TreeNode

MAX_OVERTAKING = 32
WINDOW = 128  # compare only the first waiting requests, so that the cost of a step is bounded
PREEMPTION_THRESHOLD = 0  # a request preempts others with a priority higher by more than this


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
        self._aged: dict[Request, int] = {}  # ... and has aged; while it runs, how many are left

    def on_arrival(self, request: Request, num_waiting: int) -> None:
        """Note that a request starts to wait behind `num_waiting` others."""
        self._due[request] = self._num_admissions + num_waiting + MAX_OVERTAKING
        self._aged[request] = self._due[request]

    def on_retraction(self, request: Request) -> None:
        """Note that a running request has lost its memory and waits again."""
        self._due[request] = self._num_admissions
        self._aged[request] += self._num_admissions

    def on_admission(self, request: Request) -> None:
        """Note that a waiting request runs now."""
        self._aged[request] -= self._num_admissions
        self._num_admissions += 1
        del self._due[request]

    def on_removal(self, request: Request) -> None:
        """Note that a request has finished or was aborted."""
        self._due.pop(request, None)
        self._aged.pop(request)

    def is_due(self, request: Request) -> bool:
        """Return whether enough other requests have overtaken this one (I5)."""
        return self._due[request] <= self._num_admissions

    def has_aged(self, request: Request) -> bool:
        """Return whether a request has been overtaken so often that no priority counts (I5)."""
        return self._aged[request] <= (self._num_admissions if request in self._due else 0)

    def level(self, request: Request) -> tuple[bool, int]:
        """Return how urgent a request is; the lowest value comes first. Aged requests are equal."""
        return (False, 0) if self.has_aged(request) else (True, request.priority)

    def may_preempt(self, request: Request, running: Request) -> bool:
        """Return whether a waiting request is urgent enough to preempt a running one."""
        difference = running.priority - request.priority
        return difference > PREEMPTION_THRESHOLD and not self.has_aged(running)

    def order(self, waiting: Iterable[Request]) -> list[Request]:
        """Return the first waiting requests in the order in which they should join.

        waiting: in order of age.
        """
        oldest = heapq.nsmallest(WINDOW, waiting, self.level)
        due = [request for request in oldest if self.is_due(request)]
        rest = self._sort([request for request in oldest if not self.is_due(request)])
        return sorted(due + rest, key=self.level)

    def _longest_prefix_first(self, requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda r: -self.kv_cache.find_prefix(r).num_pages)

    def _branch_by_branch(self, requests: list[Request]) -> list[Request]:
        """Walk the tree depth first, so that a branch is used while it is cached.

        Of two branches, the one that more requests wait for comes first.
        """
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
