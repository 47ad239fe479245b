"""`SchedulePolicy`: more urgent requests come first; m5's policy orders those of equal priority.

Upholds I5 by the bound of m5, in two ways. Due requests come before others of their priority. And
the same bound holds for all waits of a request together, also after preemptions. When it is
reached, the request has aged: it comes before all others, and nothing preempts it any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from common import EngineConfig, Request

from .kv_cache import KVCacheManager
from .m5_policy import MAX_OVERTAKING, WINDOW
from .m5_policy import SchedulePolicy as M5SchedulePolicy

__all__ = ["MAX_OVERTAKING", "WINDOW", "SchedulePolicy"]

PREEMPTION_THRESHOLD = 0  # a request preempts others with a priority higher by more than this


class SchedulePolicy(M5SchedulePolicy):
    """Knows priorities, and counts the admissions of all waits of a request together."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager) -> None:
        super().__init__(config, kv_cache)
        # The number of admissions after which a request has aged; while it runs, how many are left.
        self._aged: dict[Request, int] = {}

    def on_arrival(self, request: Request, num_waiting: int) -> None:
        super().on_arrival(request, num_waiting)
        self._aged[request] = self._due[request]

    def on_retraction(self, request: Request) -> None:
        super().on_retraction(request)
        self._aged[request] += self._num_admissions

    def on_admission(self, request: Request) -> None:
        self._aged[request] -= self._num_admissions
        super().on_admission(request)

    def on_removal(self, request: Request) -> None:
        super().on_removal(request)
        self._aged.pop(request)

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
        first = heapq.nsmallest(WINDOW, waiting, self.level)  # of equal ones, the oldest
        return sorted(super().order(first), key=self.level)
