"""Steps in flight, built by hand, as `schedule` would plan them."""

from __future__ import annotations

from typing import Any

from common import Request
from m5_overlap.in_flight import StepsInFlight
from m5_overlap.kv_cache import KVCacheManager
from m5_overlap.schedule_batch import ScheduleBatch
from tests.exercises.by_hand import make_request

NUM_PAGES = 16
PAGE_SIZE = 2


def steps_in_flight() -> StepsInFlight:
    """Return a state with no step in flight, and a pool of 16 pages of two tokens."""
    return StepsInFlight(KVCacheManager(num_rows=4, num_pages=NUM_PAGES, page_size=PAGE_SIZE))


def running(steps: Any, name: str, tokens: list[int], computed: int) -> Request:
    """Return a running request with the first `computed` of its tokens computed."""
    request = make_request(name, tokens, max_tokens=20)
    steps.kv_cache.allocate(request)
    steps.kv_cache.allocate_slots(request, computed)
    request.num_computed_tokens = computed
    return request


def decoding(names: str) -> tuple[StepsInFlight, list[Request]]:
    """Return a state, and running requests of three tokens: the next step computes the third."""
    steps = steps_in_flight()
    return steps, [running(steps, name, [1, 2, 3], computed=2) for name in names]


def plan(steps: StepsInFlight, *parts: Request | tuple[Request, int]) -> ScheduleBatch:
    """Plan a step, as `schedule` does: it is the newest in flight.

    A part is a request that decodes one token, or a request and a number of tokens.
    """
    batch = ScheduleBatch()
    for part in parts:
        request, num_tokens = part if isinstance(part, tuple) else (part, 1)
        steps.kv_cache.allocate_slots(request, request.num_computed_tokens + num_tokens)
        batch.add(request, num_tokens)
    steps.batches.append(batch)
    return batch


def end(steps: Any, *requests: Request) -> None:
    """End requests, as `finish_request` does."""
    for request in requests:
        request.finish_reason = "stop"
        steps.free(request)


def audit(steps: StepsInFlight, live: list[Request], when: str) -> None:
    """Check I3 between two steps; a failure shows the last call and the state."""
    try:
        steps.check_invariants(live)
    except AssertionError as broken:
        kv_cache = steps.kv_cache
        raise AssertionError(
            f"{when}: {broken}; rows {kv_cache.table.rows}, free pages "
            f"{sorted(kv_cache.allocator.free_pages)}, {len(steps.batches)} steps in flight, "
            f"{steps.finished} have finished and hold pages"
        ) from None
