"""disaggregated.2: pages that may still be written. Leases, aborts, late messages."""

from __future__ import annotations

import pytest

from common import EngineConfig, Request
from milestones.electives.disaggregated.decode import DecodeScheduler
from milestones.electives.disaggregated.lease import LEASE_SECONDS, Leases
from milestones.electives.disaggregated.transport import End
from tests.exercises.by_hand import make_request, names

PAGE_SIZE = 4


def transferring(
    scheduler: DecodeScheduler, name: str, prompt: int, max_tokens: int = 9
) -> Request:
    """Return a request with memory that the prefill side writes, as `preallocate` leaves it."""
    request = make_request(name, [ord(name)] * prompt, max_tokens=max_tokens)
    scheduler.add_request(request)
    scheduler.waiting.remove(request)
    scheduler.policy.on_admission(request)
    scheduler.kv_cache.allocate(request)
    scheduler.kv_cache.allocate_slots(request, prompt)
    scheduler.transfer_queue.append(request)
    scheduler.check_invariants()
    return request


def make_scheduler(num_pages: int = 10) -> DecodeScheduler:
    config = EngineConfig(
        page_size=PAGE_SIZE, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100
    )
    return DecodeScheduler(config, num_pages)


def free_pages(scheduler: DecodeScheduler) -> int:
    return scheduler.kv_cache.num_free_pages


def test_a_request_arrives_with_its_first_token() -> None:
    scheduler = make_scheduler()
    request = transferring(scheduler, "A", 9)
    output = scheduler.arrive(request, End(1, (7, None), num_cached_tokens=4))
    assert output.new_tokens == ((7, None),) and request.output_token_ids == [7]
    assert scheduler.waiting_queue == [request] and not scheduler.transfer_queue
    assert request.num_uncomputed_tokens == 1, "the next step computes the first token, no prompt"
    assert request.num_cached_tokens == 4
    scheduler.check_invariants()
    assert [r.request_id for r in scheduler.schedule().requests] == ["A"]
    assert scheduler.running == [request]


def test_others_can_match_pages_that_have_arrived() -> None:
    scheduler = make_scheduler()
    request = transferring(scheduler, "A", 9)
    other = make_request("B", request.token_ids)
    assert scheduler.kv_cache.find_prefix(other).num_pages == 0, "nothing is written yet"
    scheduler.arrive(request, End(1, (7, None)))
    assert scheduler.kv_cache.find_prefix(other).num_pages == 2


@pytest.mark.parametrize("stops", [True, False])
def test_the_first_token_may_end_a_request(stops: bool) -> None:
    """No step runs here, and nothing is held."""
    scheduler = make_scheduler()
    request = transferring(scheduler, "A", 9, max_tokens=9 if stops else 1)
    request.stop_token_ids = frozenset({7} if stops else ())
    output = scheduler.arrive(request, End(1, (7, None)))
    assert output.finish_reason == ("stop" if stops else "length")
    assert not scheduler.schedule().requests, "I3: a request that has ended is computed"
    assert free_pages(scheduler) == 10, "I3: a request that has ended holds pages"
    scheduler.check_invariants()


def test_a_request_keeps_what_the_client_knows() -> None:
    """After a retraction it arrives again. The cached tokens are those of the first time."""
    scheduler = make_scheduler()
    request = transferring(scheduler, "A", 9)
    request.num_cached_tokens = 8
    scheduler.arrive(request, End(1, (7, None), num_cached_tokens=4))
    assert request.num_cached_tokens == 8


def test_no_other_request_gets_the_pages_of_a_dropped_attempt() -> None:
    """I3: the prefill side may still write to them."""
    scheduler = make_scheduler()
    request = transferring(scheduler, "A", 9)
    pages = list(scheduler.kv_cache.pages_of(request))
    scheduler.drop(request, attempt=1)
    assert request.row is None and request.num_computed_tokens == 0
    assert names(scheduler.prealloc_queue) == "A", "it waits for the next attempt"
    assert free_pages(scheduler) == 7, "I3: pages were freed that may still be written"
    other = transferring(scheduler, "B", 9)
    assert not {*pages} & {*scheduler.kv_cache.pages_of(other)}
    scheduler.check_invariants()


def test_a_confirmed_end_frees_the_pages_once() -> None:
    scheduler = make_scheduler()
    request = transferring(scheduler, "A", 9)
    scheduler.drop(request, attempt=1)
    for _ in range(3):  # the same message may arrive more than once
        scheduler.release(1)
        assert free_pages(scheduler) == 10
        scheduler.check_invariants()
    scheduler.release(99)
    assert not scheduler.kv_cache.radix_cache.evictable_size, "I1: unwritten pages are cached"


def test_a_request_goes_on_while_its_old_attempt_ends() -> None:
    """The new attempt has other pages, and gets a token. The end of the old one touches neither."""
    scheduler = make_scheduler()
    request = transferring(scheduler, "A", 8)
    scheduler.drop(request, attempt=1)
    assert names(scheduler.prealloc_queue) == "A"
    scheduler.waiting.remove(request)
    scheduler.policy.on_admission(request)
    scheduler.kv_cache.allocate(request)
    scheduler.kv_cache.allocate_slots(request, 8)
    scheduler.transfer_queue.append(request)
    scheduler.arrive(request, End(2, (7, None)))
    scheduler.check_invariants()
    scheduler.release(1)
    scheduler.check_invariants()
    assert len(scheduler.kv_cache.pages_of(request)) == 2


def test_a_lease_ends_without_a_heartbeat() -> None:
    leases = Leases()
    leases.grant(1, now=0.0)
    leases.grant(2, now=1.0)
    leases.renew([], now=LEASE_SECONDS / 2)
    assert leases.expired(LEASE_SECONDS - 0.01) == []
    assert leases.expired(LEASE_SECONDS) == [1]
    assert leases.expired(LEASE_SECONDS + 1) == [1, 2]


def test_a_request_may_wait_for_as_long_as_the_other_side_lives() -> None:
    """A lease measures whether a side lives, and not the time in a queue."""
    leases = Leases()
    leases.grant(1, now=0.0)
    for second in range(1, 20 * int(LEASE_SECONDS)):
        leases.renew([1], now=float(second))
        assert leases.expired(float(second)) == [], "I5: it is stopped in the queue"


def test_a_dead_side_is_noticed_one_lease_after_its_last_heartbeat() -> None:
    leases = Leases()
    leases.grant(1, now=0.0)
    for second in (1.0, 2.0, 3.0):
        leases.renew([1], now=second)
    assert leases.expired(3.0 + LEASE_SECONDS - 0.01) == []
    assert leases.expired(3.0 + LEASE_SECONDS) == [1], "I3: its pages are kept for too long"


def test_a_lease_that_is_not_named_is_not_renewed() -> None:
    """A decode side that has restarted does not know the attempts of the dead one."""
    leases = Leases()
    leases.grant(1, now=0.0)
    leases.grant(2, now=0.0)
    leases.renew([2, 3], now=LEASE_SECONDS / 2)
    assert leases.expired(LEASE_SECONDS) == [1]
    assert leases.expired(10 * LEASE_SECONDS) == [1, 2], "3 has no lease, so it gets none"


def test_an_attempt_that_has_ended_has_no_lease() -> None:
    leases = Leases()
    leases.grant(1, now=0.0)
    leases.end(1)
    leases.end(1)
    leases.renew([1], now=5.0)
    assert leases.expired(1000.0) == []
