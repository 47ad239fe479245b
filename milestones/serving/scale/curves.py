"""The simulator's curves: hit rate and load against replicas, prefix skew and report delay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .policy import POLICIES, make_policy
from .simulation import Fleet, simulate
from .steps import StepModel
from .traffic import Traffic

CONVERSATIONS_PER_SECOND = 0.2  # for each replica: one request per second
NUM_PAGES = 2000  # of a replica: a quarter of all system prompts
FEW_PAGES = 600  # of a replica, where reports are varied: less than its conversations need
TOO_MANY = 16 * FEW_PAGES  # pages that a router believes in, where its belief is wrong
MIDDLE = 64  # replicas, where something else is varied
SKEWS = (0.0, 1.0, 1.5)
DELAYS = (0.0, 1.0, 10.0, None)  # seconds


@dataclass(frozen=True)
class Point:
    """One simulation. Times are in seconds; `spread` and `most_open` are ratios to the average.

    spread: requests of the busiest replica. most_open: the largest load, at a random arrival.
    """

    policy: str
    replicas: int
    skew: float
    report_delay: float | None
    num_pages: int
    believed_pages: int
    num_requests: int
    hit_rate: float
    spread: float
    most_open: float
    ttft_p50: float
    ttft_p99: float


def point(
    steps: StepModel,
    policy: str,
    replicas: int,
    per_replica: int,
    skew: float = 1.0,
    report_delay: float | None = 0.0,
    num_pages: int = NUM_PAGES,
    believed_pages: int | None = None,
) -> Point:
    """Simulate one fleet with the same load for each replica."""
    traffic = Traffic(rate=CONVERSATIONS_PER_SECOND * replicas, num_systems=256, skew=skew)
    believed = believed_pages or num_pages
    fleet = Fleet(replicas, steps, num_pages, report_delay=report_delay, believed_pages=believed)
    sessions = traffic.sessions(per_replica * replicas, seed=1)
    done = simulate(fleet, make_policy(policy, seed=1), sessions)
    return Point(
        policy,
        replicas,
        skew,
        report_delay,
        num_pages,
        believed,
        done.num_requests,
        round(done.hit_rate, 4),
        round(done.spread, 3),
        round(done.most_open, 3),
        round(done.ttft_at(50), 4),
        round(done.ttft_at(99), 4),
    )


def points(steps: StepModel, sizes: tuple[int, ...], per_replica: int) -> Iterator[Point]:
    """Yield all points: by replicas, by skew, by report delay."""
    for replicas in sizes:
        for policy in POLICIES:
            yield point(steps, policy, replicas, per_replica)
    for skew in SKEWS:
        for policy in POLICIES:
            if skew != 1.0:
                yield point(steps, policy, MIDDLE, per_replica, skew=skew)
    for believed in (FEW_PAGES, TOO_MANY):
        for delay in DELAYS:
            yield point(
                steps, "prefix", MIDDLE, per_replica,
                num_pages=FEW_PAGES, report_delay=delay, believed_pages=believed,
            )  # fmt: skip


def rows(found: list[Point]) -> list[dict[str, object]]:
    """Return points as they are stored."""
    return [asdict(one) for one in found]
