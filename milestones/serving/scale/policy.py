"""Policies: which replica gets the next request.

`RoundRobin` ignores the replicas' state. `LeastLoad` takes the less loaded of two random replicas.
`PrefixAffinity` prefers the replica that holds the longest prefix of the prompt, as long as that
replica is not much busier than the average.

Ray's prefix-aware router and SGLang's cache-aware router give up affinity for all replicas when the
busiest and the idlest one differ too much, and they send a prompt without a match to the replica
with the smallest tree. Here, the limit holds for each replica alone, as in consistent hashing with
bounded loads (Mirrokni et al., SODA 2018), and a prompt without a match goes to one of two random
replicas. So one busy replica does not end the affinity of the others, and a replica that has just
started does not get all new prompts at once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

FACTOR, SLACK, LEAST_SHARE = 1.25, 2.0, 0.1  # of `PrefixAffinity`
POLICIES = ("prefix", "least-load", "round-robin")


class Policy(Protocol):
    """Chooses a replica. `loads` is never empty: it has the requests of each candidate.

    uses_prefixes: whether `choose` looks at `matches`. If not, `matches` is empty.
    """

    uses_prefixes: bool

    def choose(self, loads: Mapping[str, int], matches: Mapping[str, int], size: int) -> str:
        """Return the name of a candidate.

        loads: the number of open requests of each candidate. matches: the number of leading pages
        that a replica holds; replicas without any are left out. size: whole pages of the prompt.
        """
        ...


@dataclass
class RoundRobin:
    """Takes the candidates in turn."""

    turn: int = 0
    uses_prefixes: bool = False

    def choose(self, loads: Mapping[str, int], matches: Mapping[str, int], size: int) -> str:
        """Return the next candidate, in the order of their names."""
        self.turn += 1
        return sorted(loads)[self.turn % len(loads)]


class LeastLoad:
    """Takes the less loaded of two random candidates (power of two choices: Mitzenmacher, 2001).

    If every request went to the idlest replica, several routers with the same old counts would
    all choose the same one.
    """

    uses_prefixes = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, loads: Mapping[str, int], matches: Mapping[str, int], size: int) -> str:
        """Return the less loaded of two random candidates; one of them at random if equal."""
        return self.less_loaded(loads, [*loads])

    def less_loaded(self, loads: Mapping[str, int], names: Sequence[str]) -> str:
        """Return the less loaded of two random names."""
        pair = self._random.sample(names, min(2, len(names)))
        return min(pair, key=loads.__getitem__)  # equal loads: the first, and the order is random


class PrefixAffinity(LeastLoad):
    """Takes the longest match among the candidates that are not much busier than the average.

    A candidate is eligible if its load is at most `FACTOR` times the average load plus `SLACK`
    requests. The average is eligible, so there is always a candidate. A match of less than
    `LEAST_SHARE` of the prompt does not count: the first page of a chat template is in every
    prompt, and would draw all new conversations to one replica.
    """

    uses_prefixes = True

    def choose(self, loads: Mapping[str, int], matches: Mapping[str, int], size: int) -> str:
        """Return the eligible candidate with the longest match; the less loaded of two if equal."""
        limit = self.limit(loads)
        useful = {
            name: pages
            for name, pages in matches.items()
            if pages >= LEAST_SHARE * size and loads.get(name, limit + 1) <= limit
        }
        if not useful:
            return super().choose(loads, matches, size)
        longest = max(useful.values())
        return self.less_loaded(loads, [name for name in useful if useful[name] == longest])

    def limit(self, loads: Mapping[str, int]) -> float:
        """Return the largest load of an eligible candidate, in requests."""
        return FACTOR * sum(loads.values()) / len(loads) + SLACK


def make_policy(name: str, seed: int = 0) -> Policy:
    """Return a policy by its name. Raises `ValueError` for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    if name == "round-robin":
        return RoundRobin()
    return PrefixAffinity(seed) if name == "prefix" else LeastLoad(seed)
