"""`ScheduleBatch`: the work of one step. The scheduler chooses it, the model runner computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common import Request

from .pooling_request import PoolingRequest


@dataclass
class ScheduleBatch:
    """A step computes `num_scheduled_tokens[i]` tokens of `requests[i]`.

    The tokens start at the request's `num_computed_tokens`. Decodes come first, then chunks. A
    request gets a next token only if the step computes its last token: `sampled_indices` are the
    indices i of these requests. A pooling request gets no token. `pooled_indices` are the indices
    of those that need hidden states: MEAN in every step, and LAST in the step of its last token.
    """

    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    sampled_indices: list[int] = field(default_factory=list)
    pooled_indices: list[int] = field(default_factory=list)
    is_advanced: bool = False  # see `StepsInFlight.advance`

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a next token."""
        return [self.requests[i] for i in self.sampled_indices]

    @property
    def pooled_requests(self) -> list[PoolingRequest]:
        """The pooling requests that need hidden states of this step."""
        return [r for i in self.pooled_indices if isinstance(r := self.requests[i], PoolingRequest)]

    @property
    def is_decode(self) -> bool:
        """Whether the step computes one token of each request, and samples one for each."""
        return len(self.sampled_indices) == len(self.requests) == self.num_tokens

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` tokens of a request."""
        is_last = request.num_computed_tokens + num_tokens == len(request.token_ids)
        if isinstance(request, PoolingRequest):
            if is_last or request.needs_all_tokens:
                self.pooled_indices.append(len(self.requests))
        elif is_last:
            self.sampled_indices.append(len(self.requests))
        self.requests.append(request)
        self.num_scheduled_tokens.append(num_tokens)
