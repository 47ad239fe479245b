"""Find the request that makes forwards fail, so that the other requests can continue.

When a forward of many requests fails, any one of them may be the cause. The requests are tried
again in halves, and a half that fails is halved again:

    a b c d e f g h   fails
    a b c d           passes: these four continue as before
    e f g h           fails
    e f               fails
    e                 passes
    f                 fails twice: `f` is the cause, and it ends
    g h               passes

Therefore a temporary fault does not end any request. To find a request that always fails takes
about 2 * log2(n) failed forwards, and the other requests wait only for these steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from ..request import Request


class FailureIsolation:
    """Decides which requests a step may compute during the search for the cause of a failure."""

    def __init__(self) -> None:
        self.groups: list[list[Request]] = []  # groups still to be tried; the last group is next
        # The request of the last forward, if it was the only request and that forward failed.
        self.failed_alone: weakref.ref[Request] | None = None
        self.is_put_off = False  # the last trial could not be made: other requests go first

    @property
    def is_active(self) -> bool:
        """Return whether each step must be computed before the next one is planned.

        Also after a trial that was put off. Otherwise the request of the trial could join while the
        others compute a step, fail again, and undo that step with its own one, for ever (I5).
        """
        return bool(self.groups) or self.is_put_off

    def allows(self, request: Request) -> bool:
        """Return whether the next step may compute a request."""
        return not self.groups or request in self.groups[-1]

    def allowed(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that the next step may compute, in their order."""
        if not self.groups:
            return list(requests)
        return [request for request in requests if self.allows(request)]

    def failed(self, requests: Sequence[Request]) -> Request | None:
        """Record that a forward of these live requests failed. Return the cause once it is found.

        A request is the cause if two forwards in a row computed only this request, and both failed.
        """
        self._remove(requests)
        if len(requests) == 1:
            (request,) = requests
            if self.failed_alone is not None and self.failed_alone() is request:
                self.failed_alone = None
                return request
            self.failed_alone = weakref.ref(request)
            self.groups.append([request])
        elif requests:
            self.failed_alone = None
            middle = (len(requests) + 1) // 2
            self.groups += [list(requests[middle:]), list(requests[:middle])]
        return None

    def passed(self, requests: Sequence[Request]) -> None:
        """Record that a forward of these requests did not fail.

        `requests` is empty if the step could not compute any request of the last group. Other
        requests may hold the memory that the group needs. Its trial then ends, so that the other
        requests can continue (I5).
        """
        self.failed_alone = None
        self.is_put_off = bool(self.groups) and not requests
        if self.groups:
            self._remove(requests or self.groups[-1])

    def remove(self, request: Request) -> None:
        """Remove a request that has ended (I3)."""
        self._remove([request])

    def _remove(self, requests: Sequence[Request]) -> None:
        left = ([r for r in group if r not in requests] for group in self.groups)
        self.groups = [group for group in left if group]
