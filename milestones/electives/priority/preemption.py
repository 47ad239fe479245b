"""`Preemption`: running requests that make way for a more urgent one. Plain Python data.

A preempted request loses its row, and its computed pages stay in the radix tree, unlocked. If
nothing evicts them, it goes on where it was. If they are evicted, `HiRadixCache` copies them to the
host (swap), or drops them where computing them again is faster (recompute).
"""

from __future__ import annotations

from collections.abc import Sequence

from common import Request

from .admission import Admission
from .in_flight import StepsInFlight
from .policy import SchedulePolicy
from .retraction import Retraction
from .schedule_batch import ScheduleBatch


class Preemption:
    """Finds the fewest less urgent requests that must wait so that a more urgent one can join."""

    def __init__(
        self,
        admission: Admission,
        retraction: Retraction,
        policy: SchedulePolicy,
        in_flight: StepsInFlight,
    ) -> None:
        self.admission = admission
        self.retraction = retraction
        self.running = retraction.running
        self.policy = policy
        self.in_flight = in_flight
        self.num_preemptions = 0

    def make_way(self, request: Request, batch: ScheduleBatch) -> bool:
        """Return whether a request may join this step. Preempt others if it could not otherwise.

        A request that a step in flight computes is not preempted: `Scheduler.needs_result` lets
        that step end first.
        """
        if self.admission.may_join(request, batch.tokens_of()):
            return True
        if self.in_flight.batches:
            return False
        victims = self.victims(request, batch.tokens_of())
        for victim in victims:
            batch.remove(victim)
            self.retraction.send_back(victim)
        self.num_preemptions += len(victims)
        return bool(victims)

    def victims(self, request: Request, planned: dict[Request, int]) -> list[Request]:
        """Return the requests to preempt for `request`; none if preempting all is not enough.

        planned: the tokens of each request that the step computes. The least urgent requests come
        first, of equals the newest. A request that the others make unnecessary is spared.
        """
        chosen: list[Request] = []
        for candidate in reversed(self.running):
            if not self.policy.may_preempt(request, candidate):
                continue
            chosen.append(candidate)
            if self.admission.may_join(request, planned, chosen):
                for spared in chosen[-2::-1]:
                    rest = [victim for victim in chosen if victim is not spared]
                    if self.admission.may_join(request, planned, rest):
                        chosen = rest
                return chosen
        return []

    def is_needed(self, order: Sequence[Request], continuing: Sequence[Request]) -> bool:
        """Return whether the first of these waiting requests would preempt others.

        continuing: the requests that go on after the step in flight.
        """
        planned = {request: request.num_uncomputed_tokens for request in continuing}
        for request in order:
            if not self.admission.waits_for_prefix(request):
                is_stuck = not self.admission.may_join(request, planned)
                return is_stuck and bool(self.victims(request, planned))
        return False
