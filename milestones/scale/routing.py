"""`Routing`: the balancer and the tickets of open calls, which a front and Ray's router share."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from .balancer import Balancer, Ticket
from .policy import make_policy
from .wire import ForwardedCall

UNKNOWN_PAGES = 1 << 14  # of a replica, until the front has its description


class Routing:
    """The balancer, and the tickets of the calls that are open."""

    def __init__(self, policy: str, most_open: int) -> None:
        self.balancer = Balancer(make_policy(policy))
        self.num_pages = UNKNOWN_PAGES
        self._most_open = most_open
        self._dead: set[str] = set()  # Ray gives each replica a new name
        self._open: set[int] = set()  # numbers of calls
        self._tickets: dict[int, tuple[str, Ticket]] = {}
        self._lock = threading.Lock()

    def update(self, names: Iterable[str]) -> None:
        """Take over Ray's list of replicas. A new replica has an empty cache."""
        with self._lock:
            wanted = set(names) - self._dead
            self.balancer.keep_only(wanted)
            for name in sorted(wanted.difference(self.balancer.names)):
                self.balancer.add(name, self.num_pages)

    def set_size(self, num_pages: int) -> None:
        """Set the number of pages of all replicas. They must not have had a request yet."""
        with self._lock:
            self.num_pages = num_pages
            for name in self.balancer.names:
                self.balancer.add(name, num_pages)

    def died(self, name: str | None) -> None:
        """Forget a replica that has died. Ray may list it for a few more seconds."""
        if name is not None:
            with self._lock:
                self._dead.add(name)
                self.balancer.remove(name)

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
            name = self.balancer.choose(call.keys, names, self._most_open)
            if name is not None:
                self._tickets[call.number] = name, self.balancer.send(name, call.keys)
            return name

    def close(self, number: int) -> str | None:
        """Count a call as ended, in whatever way. Return the name of its replica."""
        with self._lock:
            self._open.discard(number)
            return self._release(number)

    def _release(self, number: int) -> str | None:
        name, ticket = self._tickets.pop(number, (None, None))
        if ticket is not None:
            ticket.close()
        return name


ROUTINGS: dict[str, Routing] = {}  # of this process, by the name of the application


def routing_of(app: str, policy: str, most_open: int) -> Routing:
    """Return the routing of an application in this process."""
    return ROUTINGS.setdefault(app, Routing(policy, most_open))
