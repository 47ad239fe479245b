"""`StepsInFlight`: the steps of one plan, at most `NUM_STEPS`. Plain Python data.

    plan N+1   The requests of N are *advanced*: their lengths are those after N, and a placeholder
               stands for the token that N will sample.
    planned    All requests *retreat*: they get back the lengths that they have before the plan.
    end of N   N is advanced again, and tokens replace its placeholders. A request that finishes
               with its token keeps its pages until the plan ends.

Its pages must wait, because the later steps of the plan still write to them.
"""

from __future__ import annotations

from collections import Counter

from common import Request

from .kv_cache import KVCacheManager
from .m5_in_flight import StepsInFlight as M5StepsInFlight
from .m5_in_flight import continuing, num_rows
from .schedule_batch import ScheduleBatch

__all__ = ["NUM_STEPS", "StepsInFlight", "continuing", "num_rows"]

NUM_STEPS = 8  # of a plan, at most; vLLM called it num_scheduler_steps


class StepsInFlight(M5StepsInFlight):
    """The batches of a plan, and the finished requests that they still write."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        super().__init__(kv_cache)
        # The number of tokens of each finished request that were planned when it finished: its
        # pages have room for them.
        self.planned: dict[Request, int] = {}

    def retreat(self) -> None:
        """Undo `advance` for all batches, newest first."""
        for batch in reversed(self.batches):
            self._retreat(batch)

    def free(self, request: Request) -> None:
        """Free the memory of a finished request as soon as no step in flight writes it (I3)."""
        planned = self._planned_tokens()[request]
        if planned:
            self.planned.setdefault(request, planned)
            self.finished.append(request)
        else:
            self.planned.pop(request, None)
            self.kv_cache.free(request)

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if, between two steps, a length or an owner is wrong."""
        assert not any(batch.is_advanced for batch in self.batches), (
            "I1: a placeholder is left behind"
        )
        written = self._planned_tokens() | Counter(self.planned)
        assert all(request in written for request in self.finished), (
            f"I3: {self.finished} have finished and hold pages that no step in flight writes"
        )
        self.kv_cache.check_invariants([*running, *self.finished], written)

    def _planned_tokens(self) -> Counter[Request]:
        """Return how many tokens of each request the steps in flight compute."""
        planned = Counter[Request]()
        for batch in self.batches:
            planned.update(dict(batch.tokens_per_request()))
        return planned

    def _retreat(self, batch: ScheduleBatch) -> None:
        """Restore the lengths that the requests of a batch have before it."""
        if batch.is_advanced:
            batch.is_advanced = False
            for request, num_tokens in batch.tokens_per_request():
                if not request.is_finished:
                    request.num_computed_tokens -= num_tokens
            for request in batch.sampled_requests:
                if not request.is_finished:
                    request.token_ids.pop()
