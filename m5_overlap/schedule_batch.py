"""`ScheduleBatch`: the work of one step. The scheduler chooses it, the model runner computes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common import Request

from .add_req_result import AddReqResult


@dataclass
class ScheduleBatch:
    """A step computes `num_scheduled_tokens[i]` tokens of `requests[i]`.

    The tokens start at the request's `num_computed_tokens`. Decodes come first, then chunks. A
    request gets a next token only if the step computes its last token: `sampled_indices` are the
    indices i of these requests.
    """

    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    sampled_indices: list[int] = field(default_factory=list)
    add_result: AddReqResult = AddReqResult.CONTINUE  # of the last request that was to join
    is_advanced: bool = False  # see `StepsInFlight.advance`

    def tokens_per_request(self) -> Iterable[tuple[Request, int]]:
        """Return the requests, each with the number of tokens by which the step advances it."""
        return zip(self.requests, self.num_scheduled_tokens, strict=True)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a next token."""
        return [self.requests[i] for i in self.sampled_indices]

    @property
    def is_decode(self) -> bool:
        """Whether the step computes one token of each request, and samples one for each."""
        return len(self.sampled_indices) == len(self.requests) == self.num_tokens

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` tokens of a request."""
        if request.num_computed_tokens + num_tokens == len(request.token_ids):
            self.sampled_indices.append(len(self.requests))
        self.requests.append(request)
        self.num_scheduled_tokens.append(num_tokens)
