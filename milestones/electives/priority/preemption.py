"""`Preemption`: which running requests make way for a more urgent one. Plain Python data.

A preempted request loses its row. Its computed pages stay in the radix tree, unlocked. If nothing
evicts them, it goes on where it was. Otherwise `HiRadixCache` copies them to the host (swap), or
drops them where computing them again is faster (recompute).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common import Request

from .admission import Admission
from .policy import SchedulePolicy
from .schedule_batch import ScheduleBatch


class Preemption:
    """Chooses the requests that make way, and counts them."""

    def __init__(self, admission: Admission, policy: SchedulePolicy) -> None:
        self.admission = admission
        self.policy = policy
        self.num_preemptions = 0

    def make_way(
        self, request: Request, running: list[Request], batch: ScheduleBatch, *, may_preempt: bool
    ) -> list[Request] | None:
        """Return the requests that leave this step, so that `request` joins; None if it must wait.

        may_preempt: False while a step is in flight. A request that it computes is not preempted:
        `Scheduler.needs_result` lets that step end first.
        """
        planned = dict(batch.tokens_per_request())
        if self.admission.may_join(request, running, planned):
            return []
        victims = self.victims(request, running, planned) if may_preempt else []
        self.num_preemptions += len(victims)
        return victims or None

    def victims(
        self, request: Request, running: list[Request], planned: Mapping[Request, int]
    ) -> list[Request]:
        """Return the requests to preempt for `request`; none if preempting all is not enough.

        planned: the tokens of each request that the step computes. The least urgent requests come
        first, of equals the newest. A request that the others make unnecessary is spared.
        """
        chosen: list[Request] = []
        for candidate in reversed(running):
            if self.policy.may_preempt(request, candidate):
                chosen.append(candidate)
                if self.admission.may_join(request, running, planned, chosen):
                    break
        else:
            return []
        for spared in chosen[-2::-1]:
            rest = [victim for victim in chosen if victim is not spared]
            if self.admission.may_join(request, running, planned, rest):
                chosen = rest
        return chosen

    def is_needed(
        self, waiting: Iterable[Request], running: list[Request], continuing: Iterable[Request]
    ) -> bool:
        """Return whether the next request to join would preempt some of the continuing ones."""
        planned = {request: request.num_uncomputed_tokens for request in continuing}
        for request in self.policy.order(waiting):
            if not self.admission.waits_for_prefix(request, running):
                is_stuck = not self.admission.may_join(request, running, planned)
                return is_stuck and bool(self.victims(request, running, planned))
        return False
