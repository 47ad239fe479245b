"""`PlannedDrafter`: guesses tokens of the planned answers, right and wrong ones."""

from __future__ import annotations

import random
from itertools import chain, takewhile
from typing import Any

from common import Request

from .plan import Plan

RIGHT = (None, 0.0, 0.5, 0.9, 1.0)  # share of guesses that are right; None: prompt lookup


class PlannedDrafter:
    """Guesses for the requests of one plan. It never guesses a token with a fault.

    Such a guess would be fed before its request reaches the fault, or for another request.
    """

    def __init__(self, plan: Plan, lookup: Any) -> None:
        """lookup: the drafter that the engine would have by default."""
        self.lookup = lookup
        self.chance = random.Random(f"{plan.seed}/{plan.number}/drafts")
        self.right = self.chance.choice(RIGHT)
        requests = [r for a in chain(plan.arrivals, plan.afterwards) for r in a.requests]
        self.texts = [tokens for request in requests for tokens in request.all_tokens]
        faults = [request.fault for request in requests if request.fault is not None]
        self.faults = {(fault.position, fault.token) for fault in faults}

    def propose(self, request: Request, count: int) -> list[int]:
        assert min(request.token_ids) >= 0, "a drafter never sees a placeholder"
        start = request.num_tokens
        drafts: list[int] = self._guess(request, count)
        places = takewhile(lambda place: place not in self.faults, enumerate(drafts, start))
        return [token for _position, token in places]

    def _guess(self, request: Request, count: int) -> list[int]:
        if self.right is None:
            return list(self.lookup.propose(request, count))
        start = request.num_tokens
        text = next((t for t in self.texts if t[:start] == request.token_ids), [])
        guesses = text[start : start + self.chance.randint(0, count)]
        return [t if self.chance.random() < self.right else (t + 1) % 250 for t in guesses]
