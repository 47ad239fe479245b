"""`Balancer`: what a router knows about its replicas, and its choice for each request.

    choose(keys) ──> send(name, keys) ──> answer ──> ticket.close()
                     load + 1,                       load - 1, once, however the answer ended
                     the keys enter the index
                                       report(name, ...)
                                       the index is corrected

All methods may be called by any thread. The simulator and the router under Ray use the same class.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .policy import Policy
from .prefix_index import CacheReport, PageKey, PrefixIndex


@dataclass(eq=False)
class Replica:
    """One life of a replica. reported: the number of its newest report."""

    name: str
    reported: int = 0
    num_sent: int = 0


class Ticket:
    """A request that was sent. `close` ends it; further calls change nothing.

    A ticket belongs to one life of a replica. If the replica has been restarted in the meantime,
    `close` does not change the load of its successor.
    """

    def __init__(self, balancer: Balancer, replica: Replica) -> None:
        self._balancer: Balancer | None = balancer
        self._replica = replica

    def close(self) -> None:
        """Count the request as ended."""
        balancer, self._balancer = self._balancer, None
        if balancer is not None:
            balancer.ended(self._replica)


class Balancer:
    """Chooses replicas by a policy, counts open requests, and keeps the index of prefixes."""

    def __init__(self, policy: Policy) -> None:
        self.index = PrefixIndex()
        self._policy = policy
        self._replicas: dict[str, Replica] = {}
        self._loads: dict[str, int] = {}  # open requests
        self._lock = threading.RLock()

    def add(self, name: str, capacity: int) -> None:
        """Add a replica with an empty cache of `capacity` pages."""
        with self._lock:
            self._replicas[name] = Replica(name)
            self._loads[name] = 0
            self.index.add(name, capacity)

    def reset(self, policy: Policy) -> None:
        """Begin again with another policy, and with empty caches. No request may be open."""
        with self._lock:
            self._policy = policy
            for replica in self._replicas.values():
                self.index.clear(replica.name)
                replica.num_sent = 0

    def remove(self, name: str) -> None:
        """Forget a replica: it has died, or it accepts no more requests."""
        with self._lock:
            self._replicas.pop(name, None)
            self._loads.pop(name, None)
            self.index.remove(name)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget all other replicas."""
        with self._lock:
            for name in [*self._replicas.keys() - set(names)]:
                self.remove(name)

    @property
    def names(self) -> list[str]:
        """Return the names of the replicas."""
        with self._lock:
            return [*self._replicas]

    @property
    def loads(self) -> dict[str, int]:
        """Return the number of open requests of each replica."""
        with self._lock:
            return dict(self._loads)

    @property
    def sent(self) -> dict[str, int]:
        """Return the number of requests that were sent to each replica."""
        with self._lock:
            return {name: replica.num_sent for name, replica in self._replicas.items()}

    def choose(
        self,
        keys: Sequence[PageKey],
        among: Iterable[str] | None = None,
        most_open: int | None = None,
    ) -> str | None:
        """Return the replica for a prompt; None if there is none.

        among: the candidates; None: all replicas. most_open: replicas with that many open requests
        are full, and are left out. If all candidates are full, none is.
        """
        with self._lock:
            loads = self._loads
            if among is not None:
                loads = {name: loads[name] for name in among if name in loads}
            if most_open is not None:
                free = {name: load for name, load in loads.items() if load < most_open}
                loads = free or loads
            if not loads:
                return None
            matches = self.index.matches(keys) if self._policy.uses_prefixes else {}
            return self._policy.choose(loads, matches, len(keys))

    def send(self, name: str, keys: Sequence[PageKey]) -> Ticket:
        """Count a request for a replica, which will have its prompt in the cache."""
        with self._lock:
            replica = self._replicas[name]
            replica.num_sent += 1
            self._loads[name] += 1
            if self._policy.uses_prefixes:
                self.index.insert(name, keys)
            return Ticket(self, replica)

    def ended(self, replica: Replica) -> None:
        """Count a request of this life of a replica as ended."""
        with self._lock:
            if self._replicas.get(replica.name) is replica:
                self._loads[replica.name] -= 1

    def reported(self) -> dict[str, int]:
        """Return the number of the newest report of each replica."""
        with self._lock:
            return {name: replica.reported for name, replica in self._replicas.items()}

    def report(self, name: str, report: CacheReport) -> None:
        """Correct the index by what a replica says about its cache.

        An older report than the newest one is ignored, and so is one that does not follow on it.
        """
        with self._lock:
            replica = self._replicas.get(name)
            if replica is None or not self._policy.uses_prefixes:
                return
            if report.number <= replica.reported:
                return
            if report.after is None:
                self.index.evict(name, self.index.keys(name) - set(report.inserted))
            elif report.after > replica.reported:
                return
            replica.reported = report.number
            self.index.evict(name, report.evicted)
            self.index.insert(name, report.inserted)
