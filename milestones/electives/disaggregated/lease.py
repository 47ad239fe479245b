"""`Leases`: how long the prefill side keeps an attempt without hearing of it. Plain Python data.

The decode side renews the leases by heartbeats. A lease therefore measures whether the decode side
lives, and not how long a request takes. A fixed time limit from the beginning would measure both:
it keeps the pages of a dead side too long, or it ends requests that only wait in a queue.
"""

from __future__ import annotations

from collections.abc import Iterable

LEASE_SECONDS = 10.0
HEARTBEAT_SECONDS = LEASE_SECONDS / 4  # one lost heartbeat must not end a lease


class Leases:
    """The time at which the lease of each attempt ends."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}

    def grant(self, attempt: int, now: float) -> None:
        """Begin the lease of a new attempt."""
        self.ends[attempt] = now + LEASE_SECONDS

    def renew(self, attempts: Iterable[int], now: float) -> None:
        """Let the leases of these attempts begin again. Attempts without a lease get none."""
        for attempt in self.ends.keys() & set(attempts):
            self.ends[attempt] = now + LEASE_SECONDS

    def end(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self.ends.pop(attempt, None)

    def expired(self, now: float) -> list[int]:
        """Return the attempts with leases that have ended, oldest attempt first."""
        return sorted(attempt for attempt, end in self.ends.items() if end <= now)
