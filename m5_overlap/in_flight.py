"""`StepsInFlight`: steps that have been planned and whose results are not known. Plain Python data.

Two at most: step N, which is being computed, and N+1, which is planned meanwhile.

    plan N+1   the requests of N are *advanced*: their lengths are those after N, and what N samples
               for them is a placeholder
    end of N   the placeholders go, the tokens come; who has ended leaves, but while N+1 is writing
               his pages nobody else may have them
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from common import EngineConfig, Request

from .future_map import placeholder
from .kv_cache import KVCacheManager

if TYPE_CHECKING:
    from .scheduler import ScheduleBatch


def num_rows(config: EngineConfig) -> int:
    """A row for each request that goes on, and one for each whose last step is in flight."""
    return 2 * min(config.max_num_seqs, config.max_num_batched_tokens)


class StepsInFlight:
    """Batches that have been planned, oldest first, and requests that have ended in one of them."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self.kv_cache = kv_cache
        self.batches: deque[ScheduleBatch] = deque()
        self.leaving: list[Request] = []

    def advance(self, batch: ScheduleBatch) -> None:
        """Put the requests of the oldest batch where it will leave them."""
        if batch.is_advanced:
            return
        batch.is_advanced = True
        for i, request in enumerate(batch.requests):
            if not request.is_finished:
                request.num_computed_tokens += batch.num_scheduled_tokens[i]
                if i in batch.sampled:
                    request.token_ids.append(placeholder(request.row))

    def finish(self, batch: ScheduleBatch) -> None:
        """The oldest batch has been computed: its tokens come, and who waited for it is free."""
        assert self.batches[0] is batch, "steps end in the order in which they began"
        self.batches.popleft()
        for i in batch.sampled:
            if not batch.requests[i].is_finished:
                batch.requests[i].token_ids.pop()
        self._free_leaving()

    def take_back(self, batch: ScheduleBatch) -> None:
        """The newest batch was not computed: its requests are where they were before it."""
        assert self.batches[-1] is batch, "steps are undone newest first"
        self.batches.pop()
        if batch.is_advanced:
            for i, request in enumerate(batch.requests):
                if not request.is_finished:
                    request.num_computed_tokens -= batch.num_scheduled_tokens[i]
                    if i in batch.sampled:
                        request.token_ids.pop()
        self._free_leaving()

    def leave(self, request: Request) -> None:
        """I3: free what a request holds that has ended, once no step in flight writes it."""
        self.leaving.append(request)
        self._free_leaving()

    def check_invariants(self, running: list[Request]) -> None:
        """Between two steps: requests are where they are known to be."""
        written = Counter[Request]()  # tokens that are being computed
        for batch in self.batches:
            assert not batch.is_advanced, "I1: a placeholder is left behind"
            written.update(dict(zip(batch.requests, batch.num_scheduled_tokens, strict=True)))
        assert all(request in written for request in self.leaving), (
            f"I3: {self.leaving} hold pages that no step in flight writes"
        )
        self.kv_cache.check_invariants([*running, *self.leaving], written)

    def _free_leaving(self) -> None:
        for request in list(self.leaving):
            if not any(request in batch.requests for batch in self.batches):
                self.leaving.remove(request)
                self.kv_cache.free(request)
