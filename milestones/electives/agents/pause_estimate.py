"""`PauseEstimate`: how long a conversation will pause, from its past pauses. Plain Python data.

Most pauses are short, and a few are very long. The mean of such numbers is that of the few, so it
is wrong for nearly all of them. The mean of their logarithms describes the many: half of log-normal
pauses are shorter than its exponential.
"""

from __future__ import annotations

import math

FIRST_GUESS = 1.0  # seconds, before any pause has ended
PRIOR_WEIGHT = 1.0  # all conversations together count as much as that many pauses of this one
SHORTEST = 1e-3  # seconds: a shorter pause counts as one of this length


class PauseEstimate:
    """The number of past pauses, and the sum of their logarithms."""

    def __init__(self) -> None:
        self.count = 0
        self.log_sum = 0.0

    def observe(self, seconds: float) -> None:
        """Note that a pause has ended after so many seconds."""
        self.count += 1
        self.log_sum += math.log(max(seconds, SHORTEST))

    def expected(self, everyone: PauseEstimate | None = None) -> float:
        """Return the seconds that the next pause is expected to take.

        everyone: the pauses of all conversations. Their mean counts as `PRIOR_WEIGHT` more pauses.
        """
        prior = math.log(FIRST_GUESS if everyone is None else everyone.expected())
        total = self.log_sum + PRIOR_WEIGHT * prior
        return math.exp(total / (self.count + PRIOR_WEIGHT))
