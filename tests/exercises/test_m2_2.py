"""m2.2: which requests may join. `Scheduler.schedule` and `_admit`, two budgets, plain data."""

from __future__ import annotations

from typing import Any

import pytest

from common import Request
from m2_continuous.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names, scheduled


def make_scheduler(*lengths: int, running: str = "", **config: Any) -> Scheduler:
    """Let prompts of these lengths wait, named 0, 1, …; put the `running` requests into rows."""
    from common import EngineConfig

    scheduler = Scheduler(EngineConfig(max_model_len=100, **config))
    for i, length in enumerate(lengths):
        scheduler.add_request(make_request(f"{i}", length))
    for name in running.split():
        run(scheduler, make_request(name, 5, output=1, computed=5))
    return scheduler


def run(scheduler: Scheduler, request: Request) -> None:
    request.row = len(scheduler.kv_cache.rows)
    scheduler.kv_cache.rows.append(request)
    scheduler.running.append(request)


def test_prompts_that_fit_join_in_one_step() -> None:
    scheduler = make_scheduler(5, 3, 8)
    got = scheduled(scheduler.schedule())
    assert got == [("0", 5), ("1", 3), ("2", 8)], (
        f"three prompts wait and all fit into the step: each is computed whole; scheduled {got}"
    )


def test_a_request_that_joins_runs_and_owns_a_row() -> None:
    scheduler = make_scheduler(5, 3)
    scheduler.schedule()
    assert (names(scheduler.running), names(scheduler.waiting)) == ("0 1", "none"), (
        f"I3: a live request waits or runs: {names(scheduler.running)} run, "
        f"{names(scheduler.waiting)} wait"
    )
    scheduler.check_invariants()


def test_a_prompt_goes_before_decode() -> None:
    scheduler = make_scheduler(4, running="A B")
    got = scheduled(scheduler.schedule())
    assert got == [("0", 4)], (
        f"A and B decode, and a prompt can join: the step is only its prefill; scheduled {got}"
    )


def test_all_running_requests_decode_when_none_waits() -> None:
    scheduler = make_scheduler(running="A B C")
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1), ("B", 1), ("C", 1)], f"one token of each running request, not {got}"


def test_decode_follows_the_rows() -> None:
    """The forward reads rows 0 to B - 1 as a view: request i of the batch must be in row i."""
    scheduler = make_scheduler(running="A B C")
    a, b, c = scheduler.kv_cache.rows
    scheduler.kv_cache.rows[:] = [a, c, b]  # as after a row was freed and the last one moved
    b.row, c.row = 2, 1
    got = names(scheduler.schedule().requests)
    assert got == "A C B", f"I2: rows 0, 1, 2 belong to A, C, B, but the batch is {got}"


def test_free_rows_bound_how_many_requests_join() -> None:
    scheduler = make_scheduler(2, 2, 2, running="A B", max_num_seqs=4)
    got = names(scheduler.schedule().requests)
    assert got == "0 1", f"two of four rows are free: requests 0 and 1 join, not {got}"
    assert names(scheduler.waiting) == "2", f"request 2 still waits, not {names(scheduler.waiting)}"


def test_without_a_free_row_the_step_decodes() -> None:
    scheduler = make_scheduler(2, running="A B", max_num_seqs=2)
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1), ("B", 1)], (
        f"I5: no row is free, so the running requests must advance; scheduled {got}"
    )


@pytest.mark.parametrize("lengths", [(10, 2, 2), (2, 2, 10), (2, 10, 2)], ids=str)
def test_the_token_budget_counts_padding(lengths: tuple[int, int, int]) -> None:
    """Prompts of 10, 2 and 2 tokens are computed as three rows of 10 positions, in any order."""
    for budget, count in ((29, 2), (30, 3)):
        scheduler = make_scheduler(*lengths, max_num_batched_tokens=budget)
        got = len(scheduler.schedule().requests)
        assert got == count, (
            f"prompts of {lengths} tokens padded to 10 are 30 positions; within "
            f"max_num_batched_tokens={budget}, {count} join, not {got}"
        )


def test_no_request_overtakes_another() -> None:
    scheduler = make_scheduler(10, 20, 1, max_num_batched_tokens=20)
    got = names(scheduler.schedule().requests)
    assert got == "0", (
        f"I5: 1 does not fit beside 0; 2 would fit, but came later: only 0 joins, not {got}"
    )
    assert names(scheduler.waiting) == "1 2", (
        f"I5: the queue must be 1 2, not {names(scheduler.waiting)}"
    )


def test_a_request_that_does_not_join_is_untouched() -> None:
    scheduler = make_scheduler(10, 20, max_num_batched_tokens=20)
    scheduler.schedule()
    refused = scheduler.waiting[0]
    assert refused.row is None, f"I3: request 1 still waits, but was given row {refused.row}"
    scheduler.check_invariants()


def test_one_prompt_may_take_the_whole_budget() -> None:
    scheduler = make_scheduler(20, max_num_batched_tokens=20)
    got = scheduled(scheduler.schedule())
    assert got == [("0", 20)], f"I5: 20 tokens fit into a budget of 20; scheduled {got}"


def test_an_idle_scheduler_schedules_no_request() -> None:
    got = scheduled(make_scheduler().schedule())
    assert got == [], f"no request waits or runs; scheduled {got}"
