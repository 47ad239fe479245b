"""`Scheduler`: which requests a step computes. Here: one, until it ends; then the next.

Plain Python data, no tensors. Upholds I5: first come, first served.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common import FailureIsolation, Request


@dataclass
class ScheduleBatch:
    """The decision for one step: `num_scheduled_tokens[i]` tokens of `requests[i]`.

    They start at the request's `num_computed_tokens`.
    """

    requests: list[Request]
    num_scheduled_tokens: list[int]


class Scheduler:
    """Owns the waiting queue and the running list; a live request is in exactly one of them."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.isolation = FailureIsolation()

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> ScheduleBatch:
        """Everything the running request has not computed: its prompt first, then one token."""
        if self.waiting and not self.running:
            self.running.append(self.waiting.popleft())
        return ScheduleBatch(
            requests=list(self.running),
            num_scheduled_tokens=[r.num_tokens - r.num_computed_tokens for r in self.running],
        )

    def remove_request(self, request: Request) -> None:
        """Take a request that ends out of its queue."""
        self.isolation.forget(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def check_invariants(self) -> None:
        assert len(self.running) <= 1, f"I3: one request runs at a time, not {self.running}"
        for request in self.waiting:
            assert request.num_computed_tokens == 0, f"I3: {request} waits and holds KV"
