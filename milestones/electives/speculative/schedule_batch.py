"""`ScheduleBatch`: the work of one step, with drafts that it verifies."""

from __future__ import annotations

from dataclasses import dataclass, field

from common import Request

from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch


@dataclass
class ScheduleBatch(M5ScheduleBatch):
    """A step also computes drafts. `num_scheduled_tokens` counts them."""

    # Guesses after the newest token of a request. The step computes them and verifies them.
    drafts: dict[Request, list[int]] = field(default_factory=dict)

    def drafts_of(self, request: Request) -> list[int]:
        """Return the drafts of a request. Most requests have none."""
        return self.drafts.get(request, [])

    def tokens_per_request(self) -> list[tuple[Request, int]]:
        """Return the requests, each with the number of its tokens that are no drafts.

        How many drafts a step accepts is known when it has ended: `Drafting.accept` adds them then.
        """
        return [(r, num - len(self.drafts_of(r))) for r, num in super().tokens_per_request()]

    @property
    def outputs(self) -> list[tuple[Request, int]]:
        """The tokens to sample: request, and number of drafts before the token."""
        return [(r, i) for r in self.sampled_requests for i in range(1 + len(self.drafts_of(r)))]

    def add_drafts(self, request: Request, drafts: list[int], num_decodes: int) -> None:
        """Let one of the first `num_decodes` requests verify drafts. It moves after the others.

        Attention computes the requests with one token first.
        """
        place = self.requests.index(request)
        del self.requests[place], self.num_scheduled_tokens[place]
        self.requests.insert(num_decodes - 1, request)
        self.num_scheduled_tokens.insert(num_decodes - 1, 1 + len(drafts))
        self.drafts[request] = drafts
