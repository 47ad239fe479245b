"""Find the request that makes forwards fail, so that the other requests can continue.

When a forward of many requests fails, any one of them may be the cause. All requests leave the
core's waiting queue, and those of the failed forward go back into it in halves. A half that fails
is halved again:

    a b c d e f g h   fails
    a b c d           passes
    e f g h           fails
    e f               passes
    g                 passes: it gets its next token
    h                 fails twice: `h` is the cause, and it ends

A trial passes when each of its requests has its next token or has ended, so that each search brings
every request further (I5), even if the cause is not one request but their number. Therefore a
temporary fault does not end any request. To find one request among n takes about 2 * log2(n)
trials. All keys and values are computed again, because the core sends its requests back to the
waiting queue before each trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .engine_core import EngineCoreOutput, EngineCoreProtocol
from .request import Request


class FailureSearch:
    """Decides which requests the core may compute during the search for the cause of a failure."""

    def __init__(self, core: EngineCoreProtocol, max_step_tokens: int) -> None:
        """max_step_tokens: the most tokens of a request that one step computes."""
        self.core = core
        self.max_step_tokens = max_step_tokens
        self.requests: dict[Request, None] = {}  # all that take part or wait, in their order
        self.groups: list[list[Request]] = []  # still to be tried; the last group is next
        self.trial: list[Request] = []  # the group that is tried now
        self.pending: set[Request] = set()  # requests of the trial without a next token
        # The request that failed alone last, with the tokens that it had, and those computed.
        self.failed_alone: tuple[Request, int, int] | None = None

    @property
    def is_active(self) -> bool:
        return bool(self.requests)

    @property
    def held(self) -> list[Request]:
        """The live requests that are in no queue of the core."""
        out = [request for request in self.requests if request not in self.trial]
        return [request for request in out if not request.is_finished]

    def failed(self, requests: Sequence[Request]) -> Request | None:
        """Record that a forward of these live requests failed. Return the cause once it is found.

        A request is the cause if it fails alone twice in a row at the same place: it has got no
        token between the failures, and both steps may have computed the same token.
        """
        if not requests:  # they have ended since the forward began
            self.core.send_back()
            return None
        first = requests[0]
        place = (first, first.num_tokens, first.num_computed_tokens)
        self._take_all()
        self._forget(requests)
        if self.pending:
            self.groups.append([request for request in self.trial if request in self.pending])
        cause = None
        if len(requests) > 1:
            self.failed_alone = None
            middle = (len(requests) + 1) // 2
            self.groups += [list(requests[middle:]), list(requests[:middle])]
        elif self._is_same_place(*place):
            self.failed_alone, cause = None, first
        else:
            self.failed_alone = place
            self.groups.append([first])
        self._try_next()
        return cause

    def passed(self, results: Iterable[EngineCoreOutput]) -> None:
        """Record the results of a step. Begin the next trial if they end this one."""
        if self.is_active:
            self.pending.difference_update(result.request for result in results)
            self.prepare()

    def prepare(self) -> None:
        """Leave only the requests of a trial to the core, and begin the next trial if it is time.

        New requests wait until the search has ended.
        """
        if not self.is_active:
            return
        if all(request.is_finished for request in self.pending):
            self._take_all()
            self._try_next()
            return
        waiting = self.core.scheduler.waiting
        self.requests.update(dict.fromkeys(waiting))
        for request in [request for request in waiting if request not in self.trial]:
            waiting.remove(request)

    def release(self, request: Request) -> None:
        """Put a request that must end back where the core can find it, and forget it (I3)."""
        if request in self.requests:
            if request not in self.trial:
                self.core.scheduler.waiting.append(request)
            self._forget([request])
            del self.requests[request]

    def _is_same_place(self, request: Request, num_tokens: int, num_computed_tokens: int) -> bool:
        if self.failed_alone is None or self.failed_alone[:2] != (request, num_tokens):
            return False
        return abs(num_computed_tokens - self.failed_alone[2]) <= self.max_step_tokens

    def _take_all(self) -> None:
        """Take all requests out of the core. It undoes the steps that compute them."""
        self.core.send_back()
        waiting = self.core.scheduler.waiting
        self.requests.update(dict.fromkeys(waiting))
        waiting.clear()

    def _try_next(self) -> None:
        """Put the next group into the queue of the core; after the last group, all requests."""
        self.trial = self.groups.pop() if self.groups else []
        self.pending = set(self.trial)
        queue = self.trial or self.requests
        self.core.scheduler.waiting.extend(r for r in queue if not r.is_finished)
        if not self.trial:
            self.requests.clear()
            self.failed_alone = None

    def _forget(self, requests: Sequence[Request]) -> None:
        """Take requests out of all groups."""
        gone = set(requests)
        left = ([r for r in group if r not in gone] for group in self.groups)
        self.groups = [group for group in left if group]
        self.trial = [request for request in self.trial if request not in gone]
        self.pending -= gone
