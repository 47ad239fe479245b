"""What copies of pages take in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.clock import VirtualClock
from common.virtual_time import wrap

from .engine import LLMEngine

GIGABYTES_PER_SECOND = 16.0  # of the link between the host's memory and the device's


def add_costs(engine: LLMEngine, clock: VirtualClock) -> str:
    """Charge the copies of pages. Return what a copy takes, in words.

    The engine decides with the same number whether copying a page is worth its time.
    """
    pool, costs = engine.core.runner.host_pool, engine.core.costs
    page_bytes = pool.pages.shape[1] * pool.pages.itemsize
    costs.page_seconds = page_bytes / GIGABYTES_PER_SECOND / 1e9
    costs.token_seconds = None  # what it has observed was the machine's time

    def copy(original: Callable[..., None], transfers: Any, before_loading: Any) -> None:
        original(transfers, before_loading)
        clock.charge(len(transfers) * costs.page_seconds)

    wrap(pool, "copy", copy)
    return f", a copy of a page {1e3 * costs.page_seconds:.2g} ms ({GIGABYTES_PER_SECOND:g} GB/s)"
