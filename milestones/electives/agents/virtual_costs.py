"""What copies of pages take in virtual time: as much as a tenth of computing their tokens.

Tiny models have tiny pages. With the link of `priority`, their copies would take no time at all.
The ratio here is that of a model of 8 billion parameters: a page of 16 tokens has 2 MB, which take
0.13 ms at 16 GB/s, and its tokens take 1.6 ms at 10,000 tokens per second.
"""

from __future__ import annotations

from common.clock import VirtualClock

from .engine import LLMEngine
from .priority_virtual_costs import add_costs as add_link

SHARE = 0.1  # of the time to compute the tokens of a page


def add_costs(engine: LLMEngine, clock: VirtualClock) -> str:
    """Charge the copies of pages. Return what a copy takes, in words."""
    add_link(engine, clock)
    costs = engine.core.costs
    costs.page_seconds = SHARE * costs.page_size * clock.costs.forward_token / 1000
    return f", a copy of a page {1e3 * costs.page_seconds:.2g} ms"
