"""`Scheduler`: plans several steps while none is computed. Plain Python data, no tensors.

The first step of a plan chooses the requests, and the others repeat it with those that go on.
Planning knows lengths, but no token ids.
"""

from __future__ import annotations

from common import EngineConfig

from .in_flight import NUM_STEPS, continuing
from .m5_scheduler import Scheduler as M5Scheduler
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """Admits and retracts requests only between two plans."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.num_steps = NUM_STEPS if config.enable_overlap else 1  # the most that a plan has

    def schedule(self) -> ScheduleBatch:
        """Choose the requests of a new plan. If steps are in flight, repeat the last one."""
        return self.schedule_again() if self.in_flight.batches else super().schedule()

    def goes_on(self) -> bool:
        """Return whether the plan has one more step. Advance the requests to what comes before it.

        A plan ends after `num_steps` steps, or if a prompt is not complete, or if something needs
        a result: a decision, or a penalty, which counts the tokens of the steps in flight.
        """
        if not self.in_flight.batches:
            return False
        self.in_flight.advance(self.in_flight.batches[-1])
        requests = continuing(self.running)
        if len(self.in_flight.batches) == self.num_steps:
            return False
        if any(r.num_uncomputed_tokens > 1 or r.params.has_penalties for r in requests):
            return False
        return bool(requests) and not self.needs_result()

    def schedule_again(self) -> ScheduleBatch:
        """Plan one more step of the requests that go on: one token of each."""
        batch = ScheduleBatch()
        for request in continuing(self.running):
            self._add(batch, request, 1)
        self.in_flight.batches.append(batch)
        return batch
