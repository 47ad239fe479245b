"""`Retraction`: which requests lose their memory when no page is free. Plain Python data.

vLLM calls this preemption by recomputation. A retracted request keeps its tokens, waits at the head
of the queue, and computes its keys and values again later.
"""

from __future__ import annotations

from collections import deque

from common import Request
from common.outputs import StepCounters

from .admission import Admission
from .in_flight import StepsInFlight
from .kv_cache import KVCacheManager
from .policy import SchedulePolicy


class Retraction:
    """Moves requests from `running` back to `waiting`. Both are the scheduler's own lists."""

    def __init__(
        self,
        waiting: deque[Request],
        running: list[Request],
        kv_cache: KVCacheManager,
        admission: Admission,
        policy: SchedulePolicy,
        counters: StepCounters,
        in_flight: StepsInFlight,
    ) -> None:
        self.waiting = waiting
        self.running = running
        self.kv_cache = kv_cache
        self.admission = admission
        self.policy = policy
        self.counters = counters
        self.in_flight = in_flight

    def make_room(self, request: Request) -> None:
        """Retract the least urgent requests, the newest first, until `request` can compute a token.

        The last one to be retracted is `request` itself.
        """
        while request.row is not None and self.kv_cache.room(request) == 0:
            self.retract(self.running[-1])

    def retract(self, request: Request) -> None:
        """Free all memory of a running request. It will compute its tokens again."""
        assert not self.in_flight.batches, (
            f"cannot retract {request} while a step that computes it is in flight"
        )
        self.admission.expect_more()
        self.counters.num_retractions += 1
        self.send_back(request)

    def send_back(self, request: Request) -> None:
        """Move a request to the head of the queue: it comes before others of its priority."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        self.policy.on_retraction(request)
        self.waiting.appendleft(request)
