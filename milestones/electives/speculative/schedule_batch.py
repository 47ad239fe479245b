"""`ScheduleBatch`: the work of one step, with the drafts that it verifies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common import Request

from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch


@dataclass
class ScheduleBatch(M5ScheduleBatch):
    """`num_scheduled_tokens` counts drafts, too: the step computes them."""

    # Guesses behind the newest token of a request. The step computes them and verifies them.
    drafts: dict[Request, list[int]] = field(default_factory=dict)

    def advances(self) -> Iterable[tuple[Request, int]]:
        """Return the requests, each with the number of its tokens that are no drafts.

        That the step accepts drafts is not known: `Drafting.accept` adds them when it has ended.
        """
        return ((r, n - len(self.drafts.get(r, ()))) for r, n in super().advances())

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
