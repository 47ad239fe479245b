"""disaggregated.1: which pages a step sends, and when memory is allocated for them."""

from __future__ import annotations

import pytest

from common import EngineConfig, Request
from milestones.electives.disaggregated.decode import DecodeScheduler
from milestones.electives.disaggregated.prefill import PrefillScheduler
from milestones.electives.disaggregated.schedule_batch import PageSend, ScheduleBatch
from milestones.electives.disaggregated.transport import Bootstrap, Pages
from tests.exercises.by_hand import make_request, names

PAGE_SIZE = 16
FIRST_TARGET = 100  # pages of the decode side: 100, 101, ...


def make_prefill(chunk: int, num_pages: int = 20) -> PrefillScheduler:
    """Return a prefill side that computes `chunk` tokens in a step."""
    config = EngineConfig(page_size=PAGE_SIZE, max_num_batched_tokens=chunk, max_model_len=200)
    return PrefillScheduler(config, num_pages)


def begin(scheduler: PrefillScheduler, request: Request, attempt: int = 1, start: int = 0) -> None:
    """Begin an attempt, with memory on the decode side for all pages from `start` on."""
    request.max_num_tokens = request.num_tokens + 1
    scheduler.bootstrap(Bootstrap(attempt, request, ()))
    count = scheduler.kv_cache.pages_for(request.num_tokens) - start
    scheduler.start(Pages(attempt, start, [FIRST_TARGET + start + i for i in range(count)]))


def compute(scheduler: PrefillScheduler, batch: ScheduleBatch, token: int = 7) -> None:
    """Let a planned step be computed."""
    scheduler.in_flight.advance(batch)
    scheduler.update_from_output(batch, [(token, None)] * len(batch.sampled_requests))


def sends_of(scheduler: PrefillScheduler) -> list[list[PageSend]]:
    """Run steps until nothing is left to compute. Return what each step sends."""
    sends = []
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        sends.append(batch.sends)
        compute(scheduler, batch)
        scheduler.check_invariants()
    return sends


def targets(steps: list[list[PageSend]]) -> list[list[int]]:
    """Return where the pages of each step go."""
    return [[page for send in step for page in send.targets] for step in steps]


def test_a_page_is_sent_by_the_step_that_completes_it() -> None:
    scheduler = make_prefill(chunk=20)
    begin(scheduler, make_request("A", 40))
    found = targets(sends_of(scheduler))
    assert found == [[100], [101, 102]], "40 tokens: page 0, then page 1 and the last 8 tokens"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("chunk", [1, 7, 16, 20, 64])
def test_each_page_goes_once(length: int, chunk: int) -> None:
    scheduler = make_prefill(chunk)
    request = make_request("A", length)
    begin(scheduler, request)
    steps = sends_of(scheduler)
    sent = [page for step in targets(steps) for page in step]
    assert sent == [100 + i for i in range(-(-length // PAGE_SIZE))], "I1: a page is missing"
    assert steps[-1], "the last page goes with the last token"
    sources = [page for step in steps for send in step for page in send.sources]
    assert sources == scheduler.kv_cache.pages_of(request), "I1: the pages are in another order"


@pytest.mark.parametrize("start", [1, 2])
def test_a_prefix_that_the_other_side_has_is_not_sent(start: int) -> None:
    """Both sides count pages from the beginning of the row."""
    scheduler = make_prefill(chunk=20)
    request = make_request("A", 40)
    begin(scheduler, request, start=start)
    steps = sends_of(scheduler)
    assert [page for step in targets(steps) for page in step] == [100 + i for i in range(start, 3)]
    sources = [page for step in steps for send in step for page in send.sources]
    assert sources == scheduler.kv_cache.pages_of(request)[start:]


def test_pages_that_are_cached_here_are_sent_too() -> None:
    """They were computed for another request, and the decode side may have evicted its copy."""
    scheduler = make_prefill(chunk=64)
    begin(scheduler, make_request("A", 40), attempt=1)
    sends_of(scheduler)
    scheduler.end(1)
    begin(scheduler, make_request("B", 40), attempt=2)
    steps = sends_of(scheduler)
    assert targets(steps) == [[100, 101, 102]], "two pages come from the cache, one is computed"


def test_a_step_that_is_undone_has_sent_nothing() -> None:
    scheduler = make_prefill(chunk=20)
    begin(scheduler, make_request("A", 40))
    compute(scheduler, scheduler.schedule())
    undone = scheduler.schedule()
    scheduler.undo(undone)
    again = sends_of(scheduler)
    assert targets(again) == targets([undone.sends]) == [[101, 102]], "I1: a page is missing"


def make_decode(num_pages: int, max_num_seqs: int = 8) -> DecodeScheduler:
    config = EngineConfig(
        page_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=200
    )
    return DecodeScheduler(config, num_pages)


def test_memory_is_allocated_before_a_transfer_begins() -> None:
    scheduler = make_decode(num_pages=10)
    request = make_request("A", 9, max_tokens=1)
    scheduler.add_request(request)
    assert names(scheduler.preallocate()) == "A"
    assert len(scheduler.kv_cache.pages_of(request)) == 3, "memory for all tokens of the prompt"
    assert scheduler.transfer_queue == [request] and not scheduler.prealloc_queue
    scheduler.check_invariants()


def test_a_request_waits_for_memory_without_holding_any() -> None:
    """I5: two requests that hold a part each could wait for each other."""
    scheduler = make_decode(num_pages=5)
    for name in "AB":
        scheduler.add_request(make_request(name, 12, max_tokens=1))
    assert names(scheduler.preallocate()) == "A"
    assert names(scheduler.prealloc_queue) == "B"
    assert scheduler.prealloc_queue[0].row is None, "I3: B waits, but it holds a row"
    scheduler.check_invariants()


def test_running_requests_keep_room_to_grow() -> None:
    scheduler = make_decode(num_pages=8)
    scheduler.admission.new_token_ratio = 1.0
    scheduler.add_request(make_request("A", [1] * 8, max_tokens=16))
    assert names(scheduler.preallocate()) == "A", "alone, it may use the whole pool"
    scheduler.running.append(scheduler.transfer_queue.pop())  # its pages have arrived
    scheduler.add_request(make_request("B", [2] * 12, max_tokens=1))
    assert not scheduler.preallocate(), "A is expected to need six pages, so B must wait"
    scheduler.add_request(make_request("C", [3] * 4, max_tokens=1))
    assert not scheduler.preallocate(), "C must not overtake B for ever"


def test_a_row_is_needed_too() -> None:
    scheduler = make_decode(num_pages=20, max_num_seqs=2)
    for name in "ABC":
        scheduler.add_request(make_request(name, [ord(name)] * 4, max_tokens=1))
    assert names(scheduler.preallocate()) == "A B"
    scheduler.check_invariants()


def test_a_prefix_that_is_on_its_way_is_not_sent_twice() -> None:
    scheduler = make_decode(num_pages=20)
    for name in "AB":
        scheduler.add_request(make_request(name, 13, max_tokens=1))
    other = make_request("C", [99] * 5, max_tokens=1)
    scheduler.add_request(other)
    assert names(scheduler.preallocate()) == "A C", "B waits for the pages of A, and C does not"
