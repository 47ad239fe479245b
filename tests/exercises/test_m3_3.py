"""m3.3: admission by expectation. `Admission.has_budget`, `fits`, `expected_pages`; plain data."""

from __future__ import annotations

import copy

import pytest

from m3_paged.schedule_batch import ScheduleBatch
from m3_paged.scheduler import Scheduler
from tests.exercises.by_hand import make_request
from tests.exercises.paged_states import make_scheduler, run, show, wait


def fits(scheduler: Scheduler) -> bool:
    """Ask whether the memory is expected to last, if X, the first that waits, joins."""
    return scheduler.admission.fits(scheduler.waiting[0], scheduler.running)


def can_admit(scheduler: Scheduler, scheduled: int = 0) -> bool:
    """Ask whether X can join a step in which `scheduled` tokens are scheduled already."""
    batch = ScheduleBatch([make_request("before", scheduled)], [scheduled], [])
    has_budget = scheduler.admission.has_budget(batch if scheduled else ScheduleBatch())
    return has_budget and fits(scheduler)


def test_rows_and_tokens_do_not_ask_for_memory() -> None:
    """`has_budget` is about this step. Only `fits` compares the memory."""
    scheduler = make_scheduler(3)
    scheduler.admission.new_token_ratio = 1.0
    run(scheduler, "A", 8, max_tokens=30)
    wait(scheduler, "X", 12)
    assert scheduler.admission.has_budget(ScheduleBatch()), f"a row is free; {show(scheduler)}"
    assert not fits(scheduler), f"no page is; {show(scheduler)}"


def test_all_rows_are_taken() -> None:
    scheduler = make_scheduler(100, max_num_seqs=2)
    wait(scheduler, "X", 3)
    run(scheduler, "A", 5)
    assert can_admit(scheduler), f"one of two rows is free; {show(scheduler)}"
    run(scheduler, "B", 5)
    assert not can_admit(scheduler), f"both rows are taken; {show(scheduler)}"


@pytest.mark.parametrize(("scheduled", "expected"), [(0, True), (15, True), (16, False)])
def test_the_step_has_a_token_left(scheduled: int, expected: bool) -> None:
    """One token is enough, because a chunk may be one token long."""
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    run(scheduler, "A", 5)
    wait(scheduler, "X", 30)
    assert can_admit(scheduler, scheduled) == expected, (
        f"{scheduled} tokens are scheduled, max_num_batched_tokens=16: X "
        f"{'can' if expected else 'cannot'} join this step"
    )


@pytest.mark.parametrize(("pages", "expected"), [(7, False), (8, True), (9, True)])
def test_memory_is_there_for_what_is_expected(pages: int, expected: bool) -> None:
    """With a ratio of 0.5, A is expected to need 4 pages (8 + 6 tokens), of which it holds 2.

    X is expected to need 4 pages (12 + 4 tokens).
    """
    scheduler = make_scheduler(pages)
    scheduler.admission.new_token_ratio = 0.5
    run(scheduler, "A", 7, output=1, computed=7, max_tokens=13)
    wait(scheduler, "X", 12, max_tokens=8)
    assert can_admit(scheduler) == expected, (
        f"A is expected to need 2 more pages and X 4, and {pages - 2} are free: X "
        f"{'can' if expected else 'cannot'} be admitted; {show(scheduler)}"
    )


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, True), (0.5, True), (1.0, False)])
def test_the_ratio_decides_how_hopeful_admission_is(ratio: float, expected: bool) -> None:
    """8 pages suffice if half of the possible tokens come, not if all come (A: 5 pages, X: 5)."""
    scheduler = make_scheduler(8)
    scheduler.admission.new_token_ratio = ratio
    run(scheduler, "A", 7, output=1, computed=7, max_tokens=13)
    wait(scheduler, "X", 12, max_tokens=8)
    assert can_admit(scheduler) == expected, (
        f"with new_token_ratio={ratio}, X {'can' if expected else 'cannot'} be admitted; "
        f"{show(scheduler)}"
    )


def test_a_prompt_half_computed_is_promised_the_rest() -> None:
    """B holds 2 pages, and its prompt of 40 tokens will certainly need 10."""
    scheduler = make_scheduler(12)
    scheduler.admission.new_token_ratio = 0.0
    run(scheduler, "B", 40, output=0, computed=8)
    wait(scheduler, "X", 12)
    assert not can_admit(scheduler), (
        f"10 pages are free; B's prompt needs 8 of them and X's needs 3; {show(scheduler)}"
    )


def test_requests_do_not_share_a_page() -> None:
    """A, B and X each need one more page for one more token: three pages, not one."""
    for pages, expected in ((4, False), (5, True)):
        scheduler = make_scheduler(pages)
        scheduler.admission.new_token_ratio = 0.0
        run(scheduler, "A", 4, output=1)
        run(scheduler, "B", 4, output=1)
        wait(scheduler, "X", 1)
        assert can_admit(scheduler) == expected, (
            f"A, B and X need one page each, and {pages - 2} are free: X "
            f"{'can' if expected else 'cannot'} be admitted; {show(scheduler)}"
        )


def test_alone_a_request_has_the_pool_to_itself() -> None:
    """No other request holds memory that could become free: X would wait for ever."""
    scheduler = make_scheduler(5)
    scheduler.admission.new_token_ratio = 1.0
    wait(scheduler, "X", 18, max_tokens=30)
    assert can_admit(scheduler), (
        f"I5: no request runs, so X must be admitted, although it may outgrow the 5 pages; "
        f"{show(scheduler)}"
    )


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9])
def test_expected_pages_at_page_edges(tokens: int) -> None:
    scheduler = make_scheduler(50)
    scheduler.admission.new_token_ratio = 0.5
    got = scheduler.admission.expected_pages(make_request("X", tokens, max_tokens=8))
    expected = (tokens + 4 + 3) // 4
    assert got == expected, (
        f"a prompt of {tokens} tokens and half of 8 more: {tokens + 4} tokens take {expected} "
        f"pages of 4, not {got}"
    )


def test_what_is_generated_already_is_not_expected_again() -> None:
    """12 of 20 output tokens are generated; half of the other 8 are expected."""
    scheduler = make_scheduler(50)
    scheduler.admission.new_token_ratio = 0.5
    request = make_request("A", 4, output=12, max_tokens=20)
    got = scheduler.admission.expected_pages(request)
    assert got == 5, f"4 + 12 tokens and 4 expected ones take 5 pages of 4, not {got}"


def test_asking_changes_nothing() -> None:
    scheduler = make_scheduler(8)
    run(scheduler, "A", 7)
    wait(scheduler, "X", 12)
    before = (
        copy.deepcopy(scheduler.kv_cache.table.rows),
        show(scheduler),
        scheduler.admission.new_token_ratio,
    )
    can_admit(scheduler)
    after = scheduler.kv_cache.table.rows, show(scheduler), scheduler.admission.new_token_ratio
    assert after == before, f"I3: asking must change nothing: before {before}, after {after}"
