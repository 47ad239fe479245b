"""`ScheduleBatch`: the work of one step. If it has grammars, its sampling waits for their masks."""

from __future__ import annotations

from dataclasses import dataclass

from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch


@dataclass
class ScheduleBatch(M5ScheduleBatch):
    """Says whether its sampling must be delayed."""

    @property
    def has_grammars(self) -> bool:
        """Whether a request that gets a next token has a grammar."""
        return any(r.params.structured_outputs is not None for r in self.sampled_requests)
