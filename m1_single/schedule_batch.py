"""`ScheduleBatch`: the work of one step. The scheduler chooses it, the model runner computes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common import Request


@dataclass
class ScheduleBatch:
    """A step computes `num_scheduled_tokens[i]` tokens of `requests[i]`.

    The tokens start at the request's `num_computed_tokens`.
    """

    requests: list[Request]
    num_scheduled_tokens: list[int]

    def tokens_per_request(self) -> Iterable[tuple[Request, int]]:
        """Return the requests, each with the number of tokens by which the step advances it."""
        return zip(self.requests, self.num_scheduled_tokens, strict=True)
