"""`ScheduleBatch`: the work of one step. A request can leave it while it is planned."""

from __future__ import annotations

from common import Request

from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch


class ScheduleBatch(M5ScheduleBatch):
    """A request that makes way is removed from the step."""

    def remove(self, request: Request) -> None:
        """Remove a request that was added before, if it is there."""
        if request in self.requests:
            place = self.requests.index(request)
            del self.requests[place], self.num_scheduled_tokens[place]
            left = [i for i in self.sampled_indices if i != place]
            self.sampled_indices = [i - (i > place) for i in left]
