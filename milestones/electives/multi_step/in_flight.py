"""`StepsInFlight`: steps that are planned, with results that are not known yet. Plain Python data.

At most `NUM_STEPS` steps are in flight: those of one plan.

    plan N+1   The requests of N are *advanced*: their lengths are those after N, and a placeholder
               stands for the token that N will sample.
    planned    All requests *retreat*: they get back the lengths that they have before the plan.
    end of N   N is advanced again, and tokens replace its placeholders. A request that finishes
               with its token keeps its pages until the plan ends, because its steps still write.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from common import EngineConfig, Request

from .kv_cache import KVCacheManager
from .placeholders import placeholder
from .schedule_batch import ScheduleBatch

NUM_STEPS = 8  # of a plan, at most; vLLM called it num_scheduler_steps


def num_rows(config: EngineConfig) -> int:
    """Return the number of rows: for requests that go on, and for those in their last step."""
    return 2 * min(config.max_num_seqs, config.max_num_batched_tokens)


def continuing(running: Iterable[Request]) -> list[Request]:
    """Return the requests that go on after the step in flight, as far as lengths can tell."""
    return [request for request in running if len(request.token_ids) < request.max_num_tokens]


class StepsInFlight:
    """The batches in flight, and the finished requests that they still write."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self.kv_cache = kv_cache
        self.batches: deque[ScheduleBatch] = deque()  # oldest first
        # They keep their pages until no batch writes them. Each has the number of its tokens that
        # were planned when it finished: its pages have room for them.
        self.finished: dict[Request, int] = {}

    def advance(self, batch: ScheduleBatch) -> None:
        """Give the requests of the oldest batch the lengths that they will have after it."""
        if batch.is_advanced:
            return
        batch.is_advanced = True
        for request, num_tokens in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            if not request.is_finished:
                request.num_computed_tokens += num_tokens
        for request in batch.sampled_requests:
            if not request.is_finished:
                request.token_ids.append(placeholder(request.row))

    def complete(self, batch: ScheduleBatch) -> None:
        """Remove the oldest batch, which has been computed, and its placeholders."""
        assert self.batches[0] is batch, "steps complete in the order in which they were planned"
        self.batches.popleft()
        for request in batch.sampled_requests:
            if not request.is_finished:
                request.token_ids.pop()
        self._free_finished()

    def retreat(self) -> None:
        """Undo `advance` for all batches, newest first."""
        for batch in reversed(self.batches):
            self._retreat(batch)

    def undo(self, batch: ScheduleBatch) -> None:
        """Remove the newest batch, which was not computed. Restore the lengths of its requests."""
        assert self.batches[-1] is batch, "steps are undone in reverse order"
        self.batches.pop()
        self._retreat(batch)
        self._free_finished()

    def free(self, request: Request) -> None:
        """Free the memory of a finished request as soon as no step in flight writes it (I3)."""
        planned = self._planned_tokens()[request]
        if planned:
            self.finished.setdefault(request, planned)
        else:
            self.finished.pop(request, None)
            self.kv_cache.free(request)

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if, between two steps, a length or an owner is wrong."""
        assert not any(batch.is_advanced for batch in self.batches), (
            "I1: a placeholder is left behind"
        )
        written = self._planned_tokens() | Counter(self.finished)
        assert all(request in written for request in self.finished), (
            f"I3: {self.finished} have finished and hold pages that no step in flight writes"
        )
        self.kv_cache.check_invariants([*running, *self.finished], written)

    def _planned_tokens(self) -> Counter[Request]:
        """Return how many tokens of each request the steps in flight compute."""
        planned = Counter[Request]()
        for batch in self.batches:
            planned.update(dict(zip(batch.requests, batch.num_scheduled_tokens, strict=True)))
        return planned

    def _retreat(self, batch: ScheduleBatch) -> None:
        """Restore the lengths that the requests of a batch have before it."""
        if batch.is_advanced:
            batch.is_advanced = False
            for request, num_tokens in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
                if not request.is_finished:
                    request.num_computed_tokens -= num_tokens
            for request in batch.sampled_requests:
                if not request.is_finished:
                    request.token_ids.pop()

    def _free_finished(self) -> None:
        for request in list(self.finished):
            self.free(request)
