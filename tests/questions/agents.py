"""The questions of agents: what random pauses leave in the pool and on the host, and estimates."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from common import AgentHint
from milestones.electives.agents.hi_radix_cache import page_keys
from tests.exercises.test_agents_1 import PAGE_SIZE
from tests.exercises.test_agents_2 import make_cache
from tests.exercises.test_agents_3 import TOKENS, Talks, observed

Asked = Iterator[tuple[str, str, Any]]
NAMES = ("a", "b", "c")


def run(chance: Random, num_host_pages: int) -> Asked:
    """Insert, protect, release and evict prefixes that begin alike, at random times."""
    cache, page, time = make_cache(num_host_pages), 100, 0.0
    cache.now = lambda: time
    if chance.random() < 0.2:
        cache.costs.page_seconds = chance.choice([0.8, 1.2, 2.5])
    stems = [[chance.randrange(3) for _ in range(10)] for _ in range(3)]
    for number in range(14):
        time += chance.choice([0.0, 1.0, 4.0])
        count = chance.randint(1, 5)
        tokens = chance.choice(stems)[: PAGE_SIZE * count]
        about = f"{num_host_pages} host pages, call {number} at {time:g} s, {tokens}"
        node = cache.insert(tokens, list(range(page, page + count)))
        page += count
        what, name = chance.random(), chance.choice(NAMES)
        if what < 0.5:
            cache.end_pause(name)
            cache.protect(name, node, time + chance.choice([1.0, 5.0, 30.0]), time + 9.0)
        elif what < 0.6:
            cache.release(node)
        elif what < 0.7:
            cache.end_pause(name)
        taken = cache.evict(chance.randint(0, cache.evictable_size // 2))
        cache.check_invariants([])
        cache.check_host()
        yield "evicted pages", about, taken
        protected = {name: pause.node is not None for name, pause in cache.pauses.items()}
        yield "paused conversations", about, [*protected.items()]
        if not num_host_pages:
            continue
        yield "transfers", about, [tuple(t) for t in cache.take_transfers()]
        keys = page_keys(tokens, PAGE_SIZE)
        yield "kept copies", about, [key in cache.copies for key in keys]


def evicted(chance: Random) -> Asked:
    """Ask without host memory."""
    yield from run(chance, 0)
    cache = make_cache(0)
    cache.protect("root", cache.root, 1.0, 9.0)
    yield "a prompt without a whole page", "the root", [*cache.pauses]


def copies(chance: Random) -> Asked:
    """Ask with a host pool that is soon full."""
    yield from run(chance, chance.randint(1, 9))


def estimates(chance: Random) -> Asked:
    """Let conversations pause, with hints of all kinds and without."""
    pauses = [chance.choice([0.0, 0.5, 2.0, 300.0]) for _ in range(chance.randint(0, 5))]
    everyone = observed(*[chance.choice([0.1, 4.0]) for _ in range(3)])
    yield "estimates", f"after {pauses}", round(observed(*pauses).expected(), 6)
    yield "estimates", f"{pauses} beside others", round(observed(*pauses).expected(everyone), 6)
    talks = Talks()
    for number in range(8):
        name = chance.choice(NAMES)
        hint = AgentHint(
            name,
            chance.choice([None, None, 3.0]),
            chance.choice([None, None, 20.0]),
            release=chance.random() < 0.2,
        )
        reason = chance.choice(["stop", "length", "stop", "abort"])
        talks.ended(hint if chance.random() < 0.9 else None, reason)
        about = f"call {number} of {TOKENS} at {talks.time:g} s, {hint}, {reason}"
        times = [
            (name, round(pause.returns_at, 6), round(pause.protected_until, 6))
            for name, pause in talks.cache.pauses.items()
        ]
        yield "times of return", about, times
        yield "known conversations", about, [*talks.talks.known]
        talks.time += chance.choice([0.5, 2.0, 60.0])


QUESTIONS = {"agents.1": (evicted, 100), "agents.2": (copies, 100), "agents.3": (estimates, 100)}
