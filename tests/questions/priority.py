"""The questions of priority: copies of random prefixes, and the victims of urgent requests."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from milestones.electives.priority.hi_radix_cache import page_keys
from milestones.electives.priority.schedule_batch import ScheduleBatch
from tests.exercises.test_priority_1 import PAGE_SIZE, make_cache
from tests.exercises.test_priority_2 import add, make_scheduler, names, state, step

Asked = Iterator[tuple[str, str, Any]]


def taken(chance: Random) -> Asked:
    """Take the copies of a prefix: one is missing, or another prefix needs the host pages."""
    count = chance.randint(3, 5)
    tokens, others = ([first] * (PAGE_SIZE * count) for first in (1, 2))
    for missing in (None, chance.randrange(1, count - 1)):
        cache = make_cache(count)
        cache.insert(tokens, list(range(100, 100 + count)))
        cache.evict(count)
        if missing is not None:
            key = page_keys(tokens, PAGE_SIZE)[missing]
            cache.free_host_pages.append(cache.copies.pop(key))
        cache.take_transfers()
        sources = cache.take_copies(tokens, 0, count)
        cache.insert(others, list(range(200, 200 + count)))
        cache.evict(count)
        cache.load(sources, list(range(300, 300 + len(sources))))
        cache.check_host()
        about = f"{count} pages, {missing} is missing"
        yield "copies of one prefix", about, [tuple(t) for t in cache.take_transfers()]


def copies(chance: Random) -> Asked:
    """Insert, evict and load prefixes that begin alike. Ask for the copies after each call."""
    yield from taken(chance)
    num_host_pages = chance.randint(1, 9)
    cache, page = make_cache(num_host_pages), 100
    if chance.random() < 0.2:
        cache.costs.page_seconds = chance.choice([0.8, 1.2, 2.5])
    stems = [[chance.randrange(3) for _ in range(10)] for _ in range(3)]
    for number in range(12):
        tokens = chance.choice(stems)[: PAGE_SIZE * chance.randint(1, 5)]
        about = f"{num_host_pages} host pages, call {number}, {tokens}"
        if chance.random() < 0.5:
            count = len(tokens) // PAGE_SIZE
            cache.insert(tokens, list(range(page, page + count)))
            page += count
        elif chance.random() < 0.6:
            cache.evict(chance.randint(0, cache.evictable_size))
        else:
            node = cache.match_prefix(tokens)
            cache.lock(node)
            sources = cache.take_copies(tokens, node.num_prefix_pages, chance.randint(0, 4))
            cache.evict(chance.randint(0, cache.evictable_size))
            cache.load(sources, list(range(page, page + len(sources))))
            cache.unlock(node)
            page += len(sources)
        cache.check_host()
        yield "transfers", about, [tuple(t) for t in cache.take_transfers()]
        yield "kept copies", about, [*cache.copies.values()]
    yield "transfers", "how many", [cache.num_written, cache.num_loaded]


def needed(chance: Random) -> Asked:
    """Ask which of three requests makes way, and whether one that is being computed does."""
    scheduler = make_scheduler(num_pages=11, max_num_seqs=8)
    for name, size in (("a", 9), ("b", 9), ("c", 1)):
        add(scheduler, name, [ord(name)] * size, chance.randint(4, 6) if name == "b" else 5)
    step(scheduler)
    urgent = add(scheduler, "urgent", [9] * 7, 0)
    chosen = scheduler.preemption.victims(urgent, scheduler.running, {})
    yield "victims", "a and b hold many pages, c one", names(chosen)
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", [1] * chance.randint(2, 5), 5)
    batch = scheduler.schedule()
    urgent = add(scheduler, "urgent", [9, 8, 7], 0)
    scheduler.in_flight.advance(batch)
    for may_preempt in (False, True):
        found = scheduler.preemption.make_way(
            urgent, scheduler.running, ScheduleBatch(), may_preempt=may_preempt
        )
        counted = [scheduler.preemption.num_preemptions, scheduler.needs_result()]
        about = f"a is being computed, may_preempt={may_preempt}"
        way = [None if found is None else names(found), *counted, state(scheduler)]
        yield "a request in flight", about, way


def victims(chance: Random) -> Asked:
    """Run requests of random sizes and priorities, and ask which of them run after each step."""
    yield from needed(chance)
    num_pages, num_seqs = chance.randint(8, 24), chance.randint(2, 5)
    scheduler = make_scheduler(num_pages, max_num_seqs=num_seqs, max_num_batched_tokens=24)
    about = f"{num_pages} pages, {num_seqs} rows"
    for number in range(10):
        size, priority = chance.randint(1, 13), chance.choice([0, 1, 5])
        request = add(scheduler, f"r{number}", [chance.randrange(4) for _ in range(size)], priority)
        running = scheduler.running
        is_stuck = not scheduler.admission.may_join(request, running, {})
        chosen = scheduler.preemption.victims(request, running, {}) if is_stuck else []
        about += f", r{number} with {size} tokens and priority {priority}"
        yield "victims", about, names(chosen)
        yield "victims", f"{about}; the step", [step(scheduler), state(scheduler)]
    yield "victims", "preemptions", scheduler.preemption.num_preemptions


QUESTIONS = {"priority.1": (copies, 100), "priority.2": (victims, 60)}
