"""`ScheduleBatch`: the work of one step. The scheduler chooses it, the model runner computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common import Request


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
    # Guesses behind the newest token of a request. The step computes them and verifies them.
    drafts: dict[Request, list[int]] = field(default_factory=dict)
    is_advanced: bool = False  # see `StepsInFlight.advance`

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

    @property
    def num_known_tokens(self) -> list[int]:
        """The tokens of each request that are no drafts."""
        counts = zip(self.requests, self.num_scheduled_tokens, strict=True)
        return [n - len(self.drafts.get(request, ())) for request, n in counts]

    @property
    def outputs(self) -> list[tuple[Request, int]]:
        """The tokens to sample: request, and number of drafts before the token."""
        sampled = self.sampled_requests
        return [(r, i) for r in sampled for i in range(1 + len(self.drafts.get(r, ())))]

    def add_drafts(self, request: Request, drafts: list[int], num_decodes: int) -> None:
        """Let one of the first `num_decodes` requests verify drafts. It moves behind the others.

        Attention computes the requests with one token first.
        """
        place = self.requests.index(request)
        del self.requests[place], self.num_scheduled_tokens[place]
        self.requests.insert(num_decodes - 1, request)
        self.num_scheduled_tokens.insert(num_decodes - 1, 1 + len(drafts))
        self.drafts[request] = drafts

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedule the next `num_tokens` tokens of a request."""
        if request.num_computed_tokens + num_tokens == len(request.token_ids):
            self.sampled_indices.append(len(self.requests))
        self.requests.append(request)
        self.num_scheduled_tokens.append(num_tokens)
