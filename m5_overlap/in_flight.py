"""`StepsInFlight`: steps that are planned, with results that are not known yet. Plain Python data.

At most two steps are in flight: step N, which the device computes, and step N+1, which the
scheduler plans meanwhile.

    plan N+1   The requests of N are *advanced*: their lengths are those after N, and a placeholder
               stands for the token that N will sample.
    end of N   Tokens replace placeholders. A request that finishes with its token keeps its pages
               until N+1 completes, because N+1 still writes to them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from common import EngineConfig, Request

from .kv_cache import KVCacheManager
from .placeholders import placeholder
from .schedule_batch import ScheduleBatch


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
        self.finished: list[Request] = []  # they keep their pages until no batch writes them

    def advance(self, batch: ScheduleBatch) -> None:
        """Give the requests of the oldest batch the lengths that they will have after it."""
        if batch.is_advanced:
            return
        batch.is_advanced = True
        for request, num_tokens in batch.tokens_per_request():
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

    def undo(self, batch: ScheduleBatch) -> None:
        """Remove the newest batch, which was not computed. Restore the lengths of its requests."""
        assert self.batches[-1] is batch, "steps are undone in reverse order"
        self.batches.pop()
        if batch.is_advanced:
            for request, num_tokens in batch.tokens_per_request():
                if not request.is_finished:
                    request.num_computed_tokens -= num_tokens
            for request in batch.sampled_requests:
                if not request.is_finished:
                    request.token_ids.pop()
        self._free_finished()

    def free(self, request: Request) -> None:
        """Free the memory of a finished request as soon as no step in flight writes it (I3)."""
        if any(request in batch.requests for batch in self.batches):
            self.finished.append(request)
        else:
            self.kv_cache.free(request)

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if, between two steps, a length or an owner is wrong."""
        written = Counter[Request]()  # tokens that are being computed
        for batch in self.batches:
            assert not batch.is_advanced, "I1: a placeholder is left behind"
            written.update(dict(zip(batch.requests, batch.num_scheduled_tokens, strict=True)))
        assert all(request in written for request in self.finished), (
            f"I3: {self.finished} have finished and hold pages that no step in flight writes"
        )
        self.kv_cache.check_invariants([*running, *self.finished], written)

    def _free_finished(self) -> None:
        finished, self.finished = self.finished, []
        for request in finished:
            self.free(request)
