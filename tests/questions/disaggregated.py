"""The questions of disaggregated: pages that are sent, memory that is held, leases that last."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from common import Request
from milestones.electives.disaggregated.lease import Leases
from milestones.electives.disaggregated.transport import End
from tests.exercises import test_disaggregated_1 as sending
from tests.exercises import test_disaggregated_2 as holding
from tests.exercises.by_hand import make_request

Asked = Iterator[tuple[str, str, Any]]


def sends(chance: Random) -> Asked:
    """Compute prompts in chunks, of which some are undone, and ask where their pages go."""
    chunk = chance.choice([3, 7, 16, 20, 31, 64])
    scheduler = sending.make_prefill(chunk, num_pages=40)
    for attempt in range(1, 4):
        length, stem = chance.randint(1, 90), chance.choice([1, 2])
        request = make_request(str(attempt), [stem] * length)
        start = chance.randint(0, (length - 1) // sending.PAGE_SIZE)
        sending.begin(scheduler, request, attempt, start)
        about = f"chunks of {chunk}, {length} tokens of {stem}, from page {start}"
        while scheduler.waiting or scheduler.running:
            batch = scheduler.schedule()
            yield "sent pages", about, [(s.attempt, s.first, s.targets) for s in batch.sends]
            if chance.random() < 0.3:
                scheduler.undo(batch)
                batch = scheduler.schedule()
                again = [(s.attempt, s.first, s.targets) for s in batch.sends]
                yield "pages sent again", about, again
            sending.compute(scheduler, batch)
        scheduler.end(attempt)


def memory(chance: Random) -> Asked:
    """Let requests ask for memory, and ask which of them get it."""
    scheduler = sending.make_decode(chance.randint(6, 20), max_num_seqs=chance.randint(1, 5))
    scheduler.admission.new_token_ratio = chance.choice([0.1, 0.5, 1.0])
    for number in range(8):
        prompt = [chance.choice([1, 2, 3])] * chance.randint(1, 20)
        request = make_request(str(number), prompt, max_tokens=chance.randint(1, 12))
        about = f"request {number}: {len(prompt)} tokens, {request.max_num_tokens} at most"
        scheduler.add_request(request)
        if chance.random() < 0.5:
            joined = scheduler.preallocate()
            yield "requests with memory", about, [r.request_id for r in joined]
            yield "their pages", about, [len(scheduler.kv_cache.pages_of(r)) for r in joined]


def both(chance: Random) -> Asked:
    """Ask about pages that are sent, and about memory."""
    yield from sends(chance)
    yield from memory(chance)


def state_of(request: Request) -> tuple[Any, ...]:
    """Return what a request holds and knows."""
    return request.row is None, request.num_computed_tokens, request.output_token_ids


def holders(chance: Random) -> Asked:
    """Let pages arrive or be dropped, confirm ends late and twice, and ask what is held."""
    scheduler, dropped = holding.make_scheduler(num_pages=40), list[int]()
    for attempt in range(1, 9):
        length = chance.randint(1, 12)
        if len(scheduler.with_rows) + len(scheduler.stand_ins) >= 4:
            break
        request = holding.transferring(scheduler, chr(64 + attempt), length, chance.choice([1, 9]))
        about = f"attempt {attempt}, {length} tokens"
        if chance.random() < 0.4:
            scheduler.drop(request, attempt)
            dropped.append(attempt)
            yield "requests that wait again", about, [r.request_id for r in scheduler.waiting]
            if chance.random() < 0.5:  # it goes on, with other pages, before its old attempt ends
                scheduler.waiting.remove(request)
                scheduler.policy.on_admission(request)
                scheduler.kv_cache.allocate(request)
                scheduler.kv_cache.allocate_slots(request, length)
                scheduler.transfer_queue.append(request)
                scheduler.arrive(request, End(100 + attempt, (chance.randrange(50), None)))
        elif chance.random() < 0.8:
            cached = chance.randint(0, length)
            scheduler.arrive(request, End(attempt, (chance.randrange(50), None), cached))
            yield "state of a request", about, request.num_cached_tokens
        yield "state of a request", about, state_of(request)
        queues = [scheduler.transfer_queue, scheduler.waiting_queue, scheduler.running]
        yield "queues", about, [[r.request_id for r in queue] for queue in queues]
        if dropped and chance.random() < 0.5:
            scheduler.release(chance.choice(dropped))
        cached = scheduler.kv_cache.radix_cache.evictable_size
        yield "free pages", about, (holding.free_pages(scheduler), cached)
        scheduler.check_invariants()


def leases(chance: Random) -> Asked:
    """Grant, renew and end leases at random times, and ask which have expired."""
    granted, now = Leases(), 0.0
    for _ in range(12):
        now += chance.choice([0.0, 1.0, 4.0, 9.0])
        attempt, named = chance.randint(1, 6), chance.sample(range(1, 9), 3)
        what = chance.choice(["grant", "renew", "renew", "end"])
        if what == "grant":
            granted.grant(attempt, now)
        elif what == "end":
            granted.end(attempt)
        else:
            granted.renew(named, now)
        about = f"{what} {named if what == 'renew' else attempt} at {now:g} s"
        yield "expired leases", about, granted.expired(now + chance.choice([0.0, 5.0, 9.5]))
        yield "ends of leases", about, sorted(granted.ends.items())


def states(chance: Random) -> Asked:
    """Ask about pages that are held, and about leases."""
    yield from holders(chance)
    yield from leases(chance)


QUESTIONS = {"disaggregated.1": (both, 80), "disaggregated.2": (states, 80)}
