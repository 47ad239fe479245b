"""Finds the request that makes forwards fail, so that the other requests can go on.

When a forward of many requests fails, any one of them may be the cause. The requests are tried
again in halves, and a half that fails is halved again:

    a b c d e f g h   fails
    a b c d           passes: these four go on as before
    e f g h           fails
    e f               fails
    e                 passes
    f                 fails twice: `f` is the cause, and ends
    g h               passes

A fault that passes by itself therefore ends no request. A request that always fails costs about
2 * log2(n) failed forwards, and the others wait no longer than those steps take.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from .request import Request

MAX_FAILURES_ALONE = 2


class FailureIsolation:
    """Says which requests a step may compute while the cause of a failed forward is searched."""

    def __init__(self) -> None:
        self.groups: list[list[Request]] = []  # still to be tried; the last one comes next
        self.failures_alone = 0  # forwards in a row that failed with this request only:
        self.failed_alone: weakref.ref[Request] | None = None

    @property
    def is_active(self) -> bool:
        return bool(self.groups)

    def allows(self, request: Request) -> bool:
        """Return whether the next step may compute a request."""
        return not self.groups or request in self.groups[-1]

    def allowed(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that the next step may compute, in their order."""
        return [request for request in requests if self.allows(request)]

    def failed(self, requests: Sequence[Request]) -> Request | None:
        """Note that a forward of these requests failed. Return the cause once it is found.

        `requests` is empty if all of them have ended: then there is nothing to try again.
        """
        self._remove(requests)
        if len(requests) == 1:
            # The request that failed alone before may have ended since.
            if self.failed_alone is None or self.failed_alone() is not requests[0]:
                self.failures_alone, self.failed_alone = 0, weakref.ref(requests[0])
            self.failures_alone += 1
            if self.failures_alone == MAX_FAILURES_ALONE:
                self.failures_alone = 0
                return requests[0]
            self.groups.append(list(requests))
        elif requests:
            self.failures_alone = 0
            middle = (len(requests) + 1) // 2
            self.groups += [list(requests[middle:]), list(requests[:middle])]
        return None

    def passed(self, requests: Sequence[Request]) -> None:
        """Note that a forward of these requests did not fail.

        `requests` is empty if the step could compute none of the last group. Other requests may
        hold the memory that the group needs: its trial ends, so that they can go on (I5).
        """
        if self.groups:
            self.failures_alone = 0
            self._remove(requests or self.groups[-1])

    def forget(self, request: Request) -> None:
        """Leave out a request that has ended (I3)."""
        self._remove([request])

    def _remove(self, requests: Sequence[Request]) -> None:
        left = ([r for r in group if r not in requests] for group in self.groups)
        self.groups = [group for group in left if group]
