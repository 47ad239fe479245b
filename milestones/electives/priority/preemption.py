"""`Preemption`: running requests make way for a more urgent one. Plain Python data.

A preempted request loses its row. Its computed pages stay in the radix tree, unlocked. If nothing
evicts them, it goes on where it was. Otherwise `HiRadixCache` copies them to the host (swap), or
drops them where computing them again is faster (recompute).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common import Request

from .retraction import Retraction
from .schedule_batch import ScheduleBatch


class Preemption(Retraction):
    """`Retraction` for want of memory, and preemption for a more urgent request."""

    num_preemptions = 0

    def make_way(self, request: Request, batch: ScheduleBatch) -> bool:
        """Return whether a request may join this step. Preempt others if it could not otherwise.

        A request that a step in flight computes is not preempted: `Scheduler.needs_result` lets
        that step end first.
        """
        planned = dict(zip(batch.requests, batch.num_scheduled_tokens, strict=True))
        if self.admission.may_join(request, planned):
            return True
        victims = [] if self.in_flight.batches else self.victims(request, planned)
        for victim in victims:
            batch.remove(victim)
            self.send_back(victim)
        self.num_preemptions += len(victims)
        return bool(victims)

    def victims(self, request: Request, planned: Mapping[Request, int]) -> list[Request]:
        """Return the requests to preempt for `request`; none if preempting all is not enough.

        planned: the tokens of each request that the step computes. The least urgent requests come
        first, of equals the newest. A request that the others make unnecessary is spared.
        """
        chosen: list[Request] = []
        for candidate in reversed(self.running):
            if self.policy.may_preempt(request, candidate):
                chosen.append(candidate)
                if self.admission.may_join(request, planned, chosen):
                    break
        else:
            return []
        for spared in chosen[-2::-1]:
            rest = [victim for victim in chosen if victim is not spared]
            chosen = rest if self.admission.may_join(request, planned, rest) else chosen
        return chosen

    def is_needed(self, continuing: Sequence[Request]) -> bool:
        """Return whether the next request to join would preempt some of the continuing ones."""
        planned = {request: request.num_uncomputed_tokens for request in continuing}
        for request in self.policy.order(self.waiting):
            if not self.admission.waits_for_prefix(request):
                is_stuck = not self.admission.may_join(request, planned)
                return is_stuck and bool(self.victims(request, planned))
        return False
