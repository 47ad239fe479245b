"""`Scheduler`: an urgent request preempts others that are less urgent. Plain Python data.

Upholds I5: the policy bounds how long a request waits, also one that others preempt. The first
running request makes progress in every step.
"""

from __future__ import annotations

from common import EngineConfig, Request

from .add_req_result import AddReqResult
from .in_flight import continuing
from .m5_scheduler import Scheduler as M5Scheduler
from .preemption import Preemption
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """`running` has the most urgent request first, and of equally urgent ones the oldest."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.preemption = Preemption(self.admission, self.policy)

    def needs_result(self) -> bool:
        """Return whether the next step must not be planned before the step in flight completes.

        There is one more reason than in m5: a waiting request would preempt one that it computes.
        """
        if super().needs_result():
            return True
        return self._is_one_more_urgent() and self.preemption.is_needed(
            self.waiting, self.running, continuing(self.running)
        )

    def _is_one_more_urgent(self) -> bool:
        """Return whether a waiting request is urgent enough to preempt the last running one."""
        last = self.running[-1:]
        return any(self.policy.may_preempt(r, least) for least in last for r in self.waiting)

    def _admit_waiting(self, batch: ScheduleBatch) -> None:
        if not self.waiting:
            return
        batch.add_result = self.admission.budget_state(batch, self.running)
        has_budget = batch.add_result is AddReqResult.CONTINUE
        if not has_budget and not self._is_one_more_urgent():
            return
        for request in self.policy.order(self.waiting):
            if self.admission.waits_for_prefix(request, self.running):
                batch.add_result = AddReqResult.PREFIX_IN_FLIGHT
                continue
            victims = self.preemption.make_way(
                request, self.running, batch, may_preempt=not self.in_flight.batches
            )
            if victims is None:
                batch.add_result = self.admission.check(request, batch, self.running)
                break
            for victim in victims:  # the lesson: they make way, and keep their tokens
                batch.remove(victim)
                self.send_back(victim)
            self._admit(request)
            self._add_chunk(batch, request)
            batch.add_result = AddReqResult.CONTINUE

    def _admit(self, request: Request) -> None:
        super()._admit(request)
        self.running.sort(key=self.policy.level)
