"""`ScheduleBatch`: the work of one step, in which some requests get a vector and no token."""

from __future__ import annotations

from dataclasses import dataclass, field

from common import Request

from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch
from .pooling_request import PoolingRequest


@dataclass
class ScheduleBatch(M5ScheduleBatch):
    """A pooling request gets no token.

    `pooled_indices` are the indices of those that need hidden states of this step: MEAN in every
    step, and LAST in the step of its last token.
    """

    pooled_indices: list[int] = field(default_factory=list)

    @property
    def pooled_requests(self) -> list[PoolingRequest]:
        """The pooling requests that need hidden states of this step."""
        return [r for i in self.pooled_indices if isinstance(r := self.requests[i], PoolingRequest)]

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` tokens of a request."""
        if not isinstance(request, PoolingRequest):
            super().add(request, num_tokens)
            return
        is_last = request.num_computed_tokens + num_tokens == len(request.token_ids)
        if is_last or request.needs_all_tokens:
            self.pooled_indices.append(len(self.requests))
        self.requests.append(request)
        self.num_scheduled_tokens.append(num_tokens)
