"""Judge a change by ratios of base and change: numbers in, words out.

A ratio is the time of the base divided by the time of the change. Above 1, the change is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

GAIN = 1.20  # the interval of the target must lie above it
NO_WORSE = 0.97  # and that of each other workload above this
CONFIDENCE = 0.95
Interval = tuple[float, float]


@dataclass(frozen=True)
class Judgement:
    """What the ratios of one workload show."""

    workload: str
    is_target: bool
    ratio: float  # the median
    interval: Interval | None  # None: there are too few pairs
    holds: bool
    words: str


def interval_of(ratios: Sequence[float]) -> Interval | None:
    """Return an interval of the median, by the sign test. None: there are too few pairs.

    A pair lies below the true median with a chance of one half. So the number of pairs below it has
    a binomial distribution, and the interval from the k-th lowest to the k-th highest ratio misses
    the median with the chance 2 * P(fewer than k pairs are below). k is the largest number with
    which this is at most 5 %. Nothing else is assumed about the noise.
    """
    n, ranked = len(ratios), sorted(ratios)
    below, k = 0.0, 0  # the chance that fewer than k + 1 pairs are below
    while k < n // 2:
        below += comb(n, k) / 2**n
        if 2 * below > 1 - CONFIDENCE:
            break
        k += 1
    return (ranked[k - 1], ranked[-k]) if k else None


def judge(
    target: str, ratios: Mapping[str, Sequence[float]], *, exact: bool = False
) -> list[Judgement]:
    """Return the judgement of each workload, the target first.

    exact: the ratios are of counters or of virtual time, and have no noise. One of each is enough.
    Raises `ValueError` if the target was not measured.
    """
    if target not in ratios:
        raise ValueError(f"the target {target} was not measured")
    found = []
    for name in sorted(ratios, key=lambda name: name != target):
        given, limit = ratios[name], GAIN if name == target else NO_WORSE
        interval = (min(given), max(given)) if exact else interval_of(given)
        holds = interval is not None and interval[0] > limit
        said = words(interval, limit)
        found.append(Judgement(name, name == target, median(given), interval, holds, said))
    return found


def words(interval: Interval | None, limit: float) -> str:
    """Say where an interval lies. Only one that is all above the limit shows something."""
    if interval is None:
        return "not shown: fewer than six pairs have no interval"
    low, high = interval
    if low > limit:
        return f"above {limit:.2f}"
    where = "lies below" if high <= limit else "does not lie above"
    return f"not shown: {where} {limit:.2f}"


def shown(judgements: Sequence[Judgement], suite_passes: bool | None = None) -> bool:
    """Whether the target gained, no other workload lost, and the suite did not fail if it ran."""
    has_target = any(one.is_target for one in judgements)
    return has_target and all(one.holds for one in judgements) and suite_passes is not False
