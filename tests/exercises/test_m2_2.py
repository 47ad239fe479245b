"""m2.2: which requests may join. `Scheduler.schedule` and `_admit`, two budgets, plain data."""

from __future__ import annotations

from typing import Any

import pytest

from common import EngineConfig, Request
from m2_continuous.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names, scheduled


def make_scheduler(*lengths: int, running: str = "", **config: Any) -> Scheduler:
    """Let prompts of these lengths wait, named 0, 1, …; put the `running` requests into rows."""
    scheduler = Scheduler(EngineConfig(device="cpu", max_model_len=100, **config))
    for i, length in enumerate(lengths):
        scheduler.add_request(make_request(f"{i}", length))
    for name in running.split():
        run(scheduler, make_request(name, 5, output=1, computed=5))
    return scheduler


def run(scheduler: Scheduler, request: Request) -> None:
    request.row = len(scheduler.kv_cache.rows)
    scheduler.kv_cache.rows.append(request)
    scheduler.running.append(request)


# Why: the prompts that wait, the requests that run, the configuration, and what a step computes.
CASES: dict[str, tuple[list[int], str, dict[str, int], list[tuple[str, int]]]] = {
    "all prompts fit, and each is computed whole": (
        [5, 3, 8], "", {}, [("0", 5), ("1", 3), ("2", 8)],
    ),
    "a prompt can join: the step is only its prefill": ([4], "A B", {}, [("0", 4)]),
    "one token of each running request": ([], "A B C", {}, [("A", 1), ("B", 1), ("C", 1)]),
    "two of four rows are free": ([2] * 3, "A B", {"max_num_seqs": 4}, [("0", 2), ("1", 2)]),
    "I5: no row is free, so the others decode": (
        [2], "A B", {"max_num_seqs": 2}, [("A", 1), ("B", 1)],
    ),
    "I5: a prompt may take the whole budget": (
        [20], "", {"max_num_batched_tokens": 20}, [("0", 20)],
    ),
    "I5: 1 does not fit, and 2 must not overtake it": (
        [10, 20, 1], "", {"max_num_batched_tokens": 20}, [("0", 10)],
    ),
    "no request waits or runs": ([], "", {}, []),
}  # fmt: skip


@pytest.mark.parametrize("why", CASES)
def test_which_requests_a_step_computes(why: str) -> None:
    """Prompts of these lengths wait, named 0, 1, …; A, B and C run."""
    lengths, running, config, expected = CASES[why]
    scheduler = make_scheduler(*lengths, running=running, **config)
    waiting = list(scheduler.waiting)
    assert scheduled(scheduler.schedule()) == expected, why
    refused = [request for request in waiting if request not in scheduler.running]
    assert list(scheduler.waiting) == refused, "I3: a live request waits or runs"
    assert all(request.row is None for request in refused), "I3: a waiting request has no row"
    scheduler.check_invariants()


def test_decode_follows_the_rows() -> None:
    """The forward reads rows 0 to B - 1 as a view: request i of the batch must be in row i."""
    scheduler = make_scheduler(running="A B C")
    a, b, c = scheduler.kv_cache.rows
    scheduler.kv_cache.rows[:] = [a, c, b]  # as after a row was freed and the last one moved
    b.row, c.row = 2, 1
    assert names(scheduler.schedule().requests) == "A C B", "I2: rows 0, 1, 2 belong to A, C, B"


def test_a_batch_is_a_snapshot() -> None:
    """A request that ends while a step is processed stays in the batch of that step."""
    scheduler = make_scheduler(running="A B C")
    batch = scheduler.schedule()
    scheduler.kv_cache.rows.pop()
    assert names(batch.requests) == "A B C", "C left its row, and the batch has changed"


def test_a_request_that_starts_again_is_computed_with_its_output() -> None:
    """R has lost its row after a failed forward: its 6 + 5 tokens are computed again."""
    scheduler = make_scheduler(3, max_num_batched_tokens=20)
    scheduler.waiting.appendleft(make_request("R", 6, output=5))
    assert scheduled(scheduler.schedule()) == [("R", 11)], (
        "R has 11 tokens; with the prompt of 3, two rows of 11 would exceed the budget of 20"
    )


def test_a_request_longer_than_the_budget_is_computed_alone() -> None:
    """Its prompt fitted. With its output it exceeds the budget, after a failed forward."""
    scheduler = make_scheduler(3, max_num_batched_tokens=10)
    scheduler.waiting.appendleft(make_request("R", 8, output=4))
    assert scheduled(scheduler.schedule()) == [("R", 12)], (
        "I5: R has 12 tokens and the budget is 10: if R did not join, it would wait for ever"
    )


@pytest.mark.parametrize("lengths", [(10, 2, 2), (2, 2, 10), (2, 10, 2)], ids=str)
@pytest.mark.parametrize(("budget", "count"), [(29, 2), (30, 3)])
def test_the_token_budget_counts_padding(lengths: tuple[int, ...], budget: int, count: int) -> None:
    """Prompts of 10, 2 and 2 tokens are computed as three rows of 10 positions, in any order."""
    scheduler = make_scheduler(*lengths, max_num_batched_tokens=budget)
    assert len(scheduler.schedule().requests) == count, (
        f"three prompts padded to 10 are 30 positions; max_num_batched_tokens={budget}"
    )
