"""`simulate`: the real router with simulated replicas, in virtual time.

The router is the `Balancer` that serves real requests. So a simulation shows what the policy does
with more replicas and requests than a machine has room for. `points` are its curves: hit rate and
load against replicas, prefix skew and report delay.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from .balancer import Balancer, Ticket
from .policy import POLICIES, Policy, make_policy
from .simulated import SimulatedReplica, SimulatedRequest
from .steps import StepModel
from .traffic import Session, Traffic

CONVERSATIONS_PER_SECOND = 0.2  # for each replica: one request per second
NUM_PAGES = 2000  # of a replica: a quarter of all system prompts
FEW_PAGES = 600  # of a replica, where reports are varied: less than its conversations need
TOO_MANY = 16 * FEW_PAGES  # pages that a router believes in, where its belief is wrong
MIDDLE = 64  # replicas, where something else is varied
SKEWS = (0.0, 1.0, 1.5)
DELAYS = (0.0, 1.0, 10.0, None)  # seconds


@dataclass(frozen=True)
class Fleet:
    """The replicas of a simulation.

    report_delay: seconds from the end of a request until the router has the report of its replica.
    None: there are no reports. believed_pages: the pages of a replica, as the router believes.
    None: it knows them.
    """

    num_replicas: int
    steps: StepModel
    num_pages: int
    page_size: int = 16
    max_num_seqs: int = 16
    report_delay: float | None = 0.0
    believed_pages: int | None = None


@dataclass
class Outcome:
    """What a simulation has counted. Tokens of prompts; times in seconds of virtual time."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)  # requests of each replica
    most_open: float = 0.0  # the mean of the largest load at an arrival, over the average load
    ttft: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Return the part of the prompt tokens that a cache had."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def spread(self) -> float:
        """Return the requests of the busiest replica, over the average."""
        return max(self.sent.values()) * len(self.sent) / sum(self.sent.values())

    def ttft_at(self, percent: int) -> float:
        """Return a percentile of the time to the first token, in seconds."""
        ordered = sorted(self.ttft)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


class Simulation:
    """One run. Events are functions of virtual time, in a heap."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.fleet = fleet
        self.balancer = Balancer(policy)
        self.replicas: dict[str, SimulatedReplica] = {}
        for number in range(fleet.num_replicas):
            name = f"r{number:04d}"
            self.replicas[name] = SimulatedReplica(
                name, fleet.steps, fleet.num_pages, fleet.page_size, fleet.max_num_seqs
            )
            self.balancer.add(name, fleet.believed_pages or fleet.num_pages)
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._due: dict[str, int] = {}  # the number of the event that is not out of date
        self._reports_due: set[str] = set()
        self._open: dict[SimulatedRequest, tuple[Ticket, Session, int]] = {}

    def run(self, sessions: Iterable[Session]) -> Outcome:
        """Run all conversations to their ends."""
        coming = iter(sessions)
        upcoming = next(coming, None)
        while upcoming is not None or self._events:
            if upcoming is not None and (not self._events or upcoming.start <= self._events[0][0]):
                self._send(upcoming, 0, upcoming.start)
                upcoming = next(coming, None)
                continue
            now, _, event = heapq.heappop(self._events)
            event(now)
        assert not self._open, "a request has no end"
        self.outcome.sent = self.balancer.sent
        self.outcome.most_open /= max(1, self.outcome.num_requests)
        return self.outcome

    def _send(self, session: Session, turn: int, now: float) -> None:
        """Send a request of a conversation to the replica that the router chooses."""
        size, (num_tokens, num_output) = self.fleet.page_size, session.turns[turn]
        keys = session.keys[: num_tokens // size]
        request = SimulatedRequest(
            keys,
            session.keys[: (num_tokens + num_output - 1) // size]
            if session.reuses_outputs
            else keys,
            num_tokens,
            num_output,
            now,
        )
        name = self.balancer.choose(request.keys)
        assert name is not None
        ticket = self.balancer.send(name, request.keys)
        self._open[request] = ticket, session, turn
        loads = self.balancer.loads.values()
        self.outcome.most_open += max(loads) * len(loads) / sum(loads)
        self.replicas[name].add(request, now)
        self._schedule(self.replicas[name])

    def _schedule(self, replica: SimulatedReplica) -> None:
        """Put the next event of a replica into the heap. Its older event is out of date."""
        number = next(self._numbers)
        self._due[replica.name] = number
        time = replica.next_event()
        if time is None:
            return

        def event(now: float) -> None:
            if self._due[replica.name] == number:
                for request in replica.run_event(now):
                    self._end(replica, request, now)
                self._schedule(replica)

        heapq.heappush(self._events, (time, number, event))

    def _end(self, replica: SimulatedReplica, request: SimulatedRequest, now: float) -> None:
        ticket, session, turn = self._open.pop(request)
        ticket.close()
        done = self.outcome
        done.num_requests += 1
        done.prompt_tokens += request.num_tokens
        done.cached_tokens += request.num_cached_pages * self.fleet.page_size
        done.ttft.append(request.first_token - request.arrival)
        done.seconds = now
        self._report(replica, now)
        if turn + 1 < len(session.turns):
            self._at(now + session.thinks[turn], lambda time: self._send(session, turn + 1, time))

    def _report(self, replica: SimulatedReplica, now: float) -> None:
        """Let the router have a report after the delay; one report at a time is on its way."""
        delay = self.fleet.report_delay
        if delay is None or replica.name in self._reports_due:
            return
        if delay == 0:
            self.balancer.report(replica.name, replica.report())
            return
        self._reports_due.add(replica.name)
        report = replica.report()

        def arrive(time: float) -> None:
            self._reports_due.discard(replica.name)
            self.balancer.report(replica.name, report)

        self._at(now + delay, arrive)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))


def simulate(fleet: Fleet, policy: Policy, sessions: Iterable[Session]) -> Outcome:
    """Run conversations on a fleet, and return what was counted."""
    return Simulation(fleet, policy).run(sessions)


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
        policy, replicas, skew, report_delay, num_pages, believed, done.num_requests,
        round(done.hit_rate, 4), round(done.spread, 3), round(done.most_open, 3),
        round(done.ttft_at(50), 4), round(done.ttft_at(99), 4),
    )  # fmt: skip


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
