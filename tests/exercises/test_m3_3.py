"""m3.3: admission by expectation. `Scheduler._can_admit` and `_expected_pages`, plain data."""

from __future__ import annotations

import copy

import pytest

from m3_paged.scheduler import ScheduleBatch, Scheduler
from tests.exercises.by_hand import make_request
from tests.exercises.paged_states import make_scheduler, run, show, wait


def can_admit(scheduler: Scheduler, scheduled: int = 0) -> bool:
    """With so many tokens in the step already."""
    batch = ScheduleBatch([make_request("before", scheduled)], [scheduled], [])
    return scheduler._can_admit(batch if scheduled else ScheduleBatch())


def test_nobody_waits() -> None:
    scheduler = make_scheduler(100)
    run(scheduler, "A", 5)
    assert not can_admit(scheduler), f"nobody waits, nobody can be admitted; {show(scheduler)}"


def test_all_rows_are_taken() -> None:
    scheduler = make_scheduler(100, max_num_seqs=2)
    wait(scheduler, "X", 3)
    run(scheduler, "A", 5)
    assert can_admit(scheduler), f"one of two rows is free; {show(scheduler)}"
    run(scheduler, "B", 5)
    assert not can_admit(scheduler), f"both rows are taken; {show(scheduler)}"


@pytest.mark.parametrize(("scheduled", "expected"), [(0, True), (15, True), (16, False)])
def test_the_step_has_a_token_left(scheduled: int, expected: bool) -> None:
    """One token is enough: a chunk may be as short as that."""
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    run(scheduler, "A", 5)
    wait(scheduler, "X", 30)
    assert can_admit(scheduler, scheduled) == expected, (
        f"{scheduled} of max_num_batched_tokens=16 are scheduled: X "
        f"{'can' if expected else 'cannot'} join this step"
    )


@pytest.mark.parametrize(("pages", "expected"), [(7, False), (8, True), (9, True)])
def test_memory_is_there_for_what_is_expected(pages: int, expected: bool) -> None:
    """Half of what may come is expected. A: 8 + 6 tokens, 4 pages, 2 held. X: 12 + 4, 4 pages."""
    scheduler = make_scheduler(pages)
    scheduler.new_token_ratio = 0.5
    run(scheduler, "A", 7, output=1, computed=7, max_tokens=13)
    wait(scheduler, "X", 12, max_tokens=8)
    assert can_admit(scheduler) == expected, (
        f"2 more pages are expected of A and 4 of X, {pages - 2} are free: X "
        f"{'can' if expected else 'cannot'} be admitted; {show(scheduler)}"
    )


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, True), (0.5, True), (1.0, False)])
def test_the_ratio_decides_how_hopeful_admission_is(ratio: float, expected: bool) -> None:
    """Eight pages: enough if half of the tokens come, not if all do (A: 5 pages, X: 5)."""
    scheduler = make_scheduler(8)
    scheduler.new_token_ratio = ratio
    run(scheduler, "A", 7, output=1, computed=7, max_tokens=13)
    wait(scheduler, "X", 12, max_tokens=8)
    assert can_admit(scheduler) == expected, (
        f"with new_token_ratio={ratio}, X {'can' if expected else 'cannot'} be admitted; "
        f"{show(scheduler)}"
    )


def test_a_prompt_half_computed_is_promised_the_rest() -> None:
    """B runs and holds 2 pages; its prompt of 40 tokens will take 10 for certain."""
    scheduler = make_scheduler(12)
    scheduler.new_token_ratio = 0.0
    run(scheduler, "B", 40, output=0, computed=8)
    wait(scheduler, "X", 12)
    assert not can_admit(scheduler), (
        f"10 pages are free, 8 of them B's prompt needs, X's needs 3; {show(scheduler)}"
    )


def test_requests_do_not_share_a_page() -> None:
    """A, B and X each need one token beyond a full page: that is three pages, not one."""
    for pages, expected in ((4, False), (5, True)):
        scheduler = make_scheduler(pages)
        scheduler.new_token_ratio = 0.0
        run(scheduler, "A", 4, output=1)
        run(scheduler, "B", 4, output=1)
        wait(scheduler, "X", 1)
        assert can_admit(scheduler) == expected, (
            f"A, B and X need a page each, {pages - 2} are free: X "
            f"{'can' if expected else 'cannot'} be admitted; {show(scheduler)}"
        )


def test_alone_a_request_has_the_pool_to_itself() -> None:
    """If it had to wait for memory that nobody holds, it would wait for ever."""
    scheduler = make_scheduler(5)
    scheduler.new_token_ratio = 1.0
    wait(scheduler, "X", 18, max_tokens=30)
    assert can_admit(scheduler), (
        f"I5: nobody runs and X may grow beyond the pool of 5 pages: admitted all the same; "
        f"{show(scheduler)}"
    )


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9])
def test_expected_pages_at_page_edges(tokens: int) -> None:
    scheduler = make_scheduler(50)
    scheduler.new_token_ratio = 0.5
    got = scheduler._expected_pages(make_request("X", tokens, max_tokens=8))
    expected = (tokens + 4 + 3) // 4
    assert got == expected, (
        f"a prompt of {tokens} and half of 8 tokens to come: {tokens + 4} tokens take {expected} "
        f"pages of 4, not {got}"
    )


def test_what_is_generated_already_is_not_expected_again() -> None:
    """12 of 20 tokens are there: of the other 8, half is expected."""
    scheduler = make_scheduler(50)
    scheduler.new_token_ratio = 0.5
    request = make_request("A", 4, output=12, max_tokens=20)
    got = scheduler._expected_pages(request)
    assert got == 5, f"4 + 12 tokens and 4 to come take 5 pages of 4, not {got}"


def test_asking_changes_nothing() -> None:
    scheduler = make_scheduler(8)
    run(scheduler, "A", 7)
    wait(scheduler, "X", 12)
    before = (
        copy.deepcopy(scheduler.kv_cache.table.rows),
        show(scheduler),
        scheduler.new_token_ratio,
    )
    can_admit(scheduler)
    after = scheduler.kv_cache.table.rows, show(scheduler), scheduler.new_token_ratio
    assert after == before, f"I3: before {before}, after {after}"
