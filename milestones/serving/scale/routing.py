"""`Routing`: the balancer and the tickets of open calls, which a front and Ray's router share."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from .balancer import Balancer, Ticket
from .policy import make_policy
from .wire import ForwardedCall

UNKNOWN_PAGES = 1 << 14  # of a replica, until the front has its description
UNREACHABLE_SECONDS = 5.0  # for so long, a replica that could not be reached gets no calls


class Routing:
    """The balancer, and the tickets of the calls that are open."""

    def __init__(
        self, policy: str, most_open: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.balancer = Balancer(make_policy(policy))
        self.num_pages = UNKNOWN_PAGES
        self._most_open = most_open
        self._clock = clock
        self._listed: set[str] = set()  # the replicas that Ray lists
        self._left_out_until: dict[str, float] = {}  # the clock's time; infinity for dead ones
        self._open: set[int] = set()  # numbers of calls
        self._tickets: dict[int, tuple[str, Ticket]] = {}
        self._lock = threading.Lock()

    def update(self, names: Iterable[str]) -> None:
        """Take over Ray's list of replicas. A new replica has an empty cache."""
        with self._lock:
            self._listed = set(names)
            self._refresh()

    def set_size(self, num_pages: int) -> None:
        """Set the number of pages of all replicas. They must not have had a request yet."""
        with self._lock:
            self.num_pages = num_pages
            for name in self.balancer.names:
                self.balancer.add(name, num_pages)

    def died(self, name: str | None) -> None:
        """Forget a replica that has died. Ray may list it for a few more seconds.

        It does not come back: Ray gives its successor a new name.
        """
        self._leave_out(name, math.inf)

    def unreachable(self, name: str | None) -> None:
        """Forget a replica that could not be reached. It may live, and may then come back."""
        self._leave_out(name, self._clock() + UNREACHABLE_SECONDS)

    def open(self, number: int) -> None:
        """Let a call choose replicas, until `close`."""
        with self._lock:
            self._open.add(number)

    def choose(self, call: ForwardedCall, names: Sequence[str]) -> str | None:
        """Choose a replica for an open call, and count it there until `close`. None: wait.

        The thread of the router may ask for a call that has just been closed.
        """
        with self._lock:
            self._release(call.number)
            if call.number not in self._open:
                return None
            self._refresh()
            name = self.balancer.choose(call.keys, names, self._most_open)
            if name is not None:
                self._tickets[call.number] = name, self.balancer.send(name, call.keys)
            return name

    def close(self, number: int) -> str | None:
        """Count a call as ended, in whatever way. Return the name of its replica."""
        with self._lock:
            self._open.discard(number)
            return self._release(number)

    def _leave_out(self, name: str | None, until: float) -> None:
        if name is not None:
            with self._lock:
                self._left_out_until[name] = max(until, self._left_out_until.get(name, 0.0))
                self._refresh()

    def _refresh(self) -> None:
        """Give the balancer the replicas that may get calls now. A new one has an empty cache."""
        now, until = self._clock(), self._left_out_until
        wanted = {name for name in self._listed if until.get(name, 0.0) <= now}
        self.balancer.keep_only(wanted)
        for name in sorted(wanted.difference(self.balancer.names)):
            self.balancer.add(name, self.num_pages)

    def _release(self, number: int) -> str | None:
        name, ticket = self._tickets.pop(number, (None, None))
        if ticket is not None:
            ticket.close()
        return name


ROUTINGS: dict[str, Routing] = {}  # of this process, by the name of the application


def routing_of(app: str, policy: str, most_open: int) -> Routing:
    """Return the routing of an application in this process."""
    return ROUTINGS.setdefault(app, Routing(policy, most_open))
