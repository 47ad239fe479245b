"""`Scheduler`: a request joins only if its adapter has a slot, or can get one."""

from __future__ import annotations

from common import EngineConfig, Request

from .adapter_slots import AdapterSlots
from .add_req_result import AddReqResult
from .m5_scheduler import Scheduler as M5Scheduler
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """Owns the slots, too."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.slots = AdapterSlots(config.max_loras, self.running)

    def schedule(self) -> ScheduleBatch:
        batch = super().schedule()
        if batch.requests:
            batch.loads = self.slots.take_loads()
        return batch

    def undo(self, batch: ScheduleBatch) -> None:
        self.slots.undo(batch.loads)
        super().undo(batch)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.slots.check_invariants()

    def _add(self, batch: ScheduleBatch, request: Request, num_tokens: int) -> None:
        self.kv_cache.allocate_slots(request, request.num_computed_tokens + num_tokens)
        batch.add(request, num_tokens, self.slots.use(request.adapter))

    def _admit_waiting(self, batch: ScheduleBatch) -> None:
        if not self.waiting:
            return
        batch.add_result = self.admission.budget_state(batch, self.running)
        if batch.add_result is not AddReqResult.CONTINUE:
            return  # none can join, so their order does not matter
        for request in self.policy.order(self.waiting):
            if not self.slots.can_use(request.adapter):
                batch.add_result = AddReqResult.OTHER
                if self.policy.is_due(request):
                    break  # I5: no request behind it joins, so that a slot becomes free
                continue  # the lesson: a request with an adapter in use, or none, may overtake
            batch.add_result = self.admission.check(request, batch, self.running)
            if batch.add_result is AddReqResult.PREFIX_IN_FLIGHT:
                continue
            if batch.add_result is not AddReqResult.CONTINUE:
                break
            self._admit(request)
            self._add_chunk(batch, request)
