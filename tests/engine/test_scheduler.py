"""The scheduler of continuous batching, tested with plain data and no model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import EngineConfig, Request
from tests.conftest import ModuleOf
from tests.exercises.by_hand import request_with
from tests.helpers.oracle import greedy

pytestmark = [pytest.mark.since("m2_continuous"), pytest.mark.before("m3_paged")]


def make_request(num_tokens: int, name: str = "r") -> Request:
    return request_with(greedy(50), [1] * num_tokens, name)


def make_scheduler(module_of: ModuleOf, *lengths: int, **config: Any) -> Any:
    scheduler = module_of("scheduler").Scheduler(EngineConfig(max_model_len=100, **config))
    for i, length in enumerate(lengths):
        scheduler.add_request(make_request(length, f"{i}"))
    return scheduler


def run(batch: Any) -> None:
    """Change the requests as a forward and the processing of its result do, without a model."""
    for request, num_tokens in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
        request.num_computed_tokens += num_tokens
        request.token_ids.append(1)


def names(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def test_prefill_first_then_decode_all(module_of: ModuleOf) -> None:
    scheduler = make_scheduler(module_of, 5, 3)
    batch = scheduler.schedule()
    assert (names(batch.requests), batch.num_scheduled_tokens) == (["0", "1"], [5, 3])
    assert batch.num_padding_tokens == 2
    run(batch)
    batch = scheduler.schedule()
    assert (names(batch.requests), batch.num_scheduled_tokens) == (["0", "1"], [1, 1])
    run(batch)
    scheduler.add_request(make_request(4, "2"))
    assert names(scheduler.schedule().requests) == ["2"], "a new prompt goes before decode"


def test_rows_bound_admission(module_of: ModuleOf) -> None:
    scheduler = make_scheduler(module_of, 1, 1, 1, max_num_seqs=2)
    run(scheduler.schedule())
    assert (names(scheduler.running), names(scheduler.waiting)) == (["0", "1"], ["2"])
    assert names(scheduler.schedule().requests) == ["0", "1"]


def test_the_token_budget_counts_padding(module_of: ModuleOf) -> None:
    """Three prompts of 10, 2 and 2 tokens are computed as 30 positions."""
    scheduler = make_scheduler(module_of, 10, 2, 2, max_num_batched_tokens=29)
    assert names(scheduler.schedule().requests) == ["0", "1"]
    scheduler = make_scheduler(module_of, 10, 2, 2, max_num_batched_tokens=30)
    assert names(scheduler.schedule().requests) == ["0", "1", "2"]


def test_no_request_overtakes_another(module_of: ModuleOf) -> None:
    """A short prompt that fits does not overtake a long prompt that does not fit."""
    scheduler = make_scheduler(module_of, 10, 20, 1, max_num_batched_tokens=20)
    assert names(scheduler.schedule().requests) == ["0"]


def test_decode_respects_the_token_budget(module_of: ModuleOf) -> None:
    scheduler = make_scheduler(module_of, *[1] * 5, max_num_batched_tokens=3)
    run(scheduler.schedule())
    assert len(scheduler.schedule().requests) == 3


def test_rows_stay_compact(module_of: ModuleOf) -> None:
    scheduler = make_scheduler(module_of, 4, 5, 6, 7)
    batch = scheduler.schedule()
    run(batch)
    first, second, third, last = batch.requests
    scheduler.finish_request(second, "abort")
    moves = scheduler.kv_cache.moves
    assert moves == [(3, 1, 7)], "the last row must move into the hole, with its 7 tokens"
    assert [r.row for r in (first, second, third, last)] == [0, None, 2, 1]
    scheduler.finish_request(third, "abort")
    assert len(moves) == 1, "removing the last row must move no row"
    scheduler.check_invariants()
    assert names(scheduler.schedule().requests) == ["0", "3"]


def test_undo_puts_a_failed_prefill_back_at_the_head(module_of: ModuleOf) -> None:
    scheduler = make_scheduler(module_of, 4, 5, 6, max_num_seqs=2)
    batch = scheduler.schedule()
    scheduler.undo(batch)
    assert names(scheduler.waiting) == ["0", "1", "2"] and not scheduler.running
    scheduler.check_invariants()
    assert scheduler.schedule().requests == batch.requests
    run(batch)
    scheduler.undo(scheduler.schedule())
    assert names(scheduler.running) == ["0", "1"], "undo of a decode must keep requests running"


@given(
    lengths=st.lists(st.integers(1, 30), max_size=12),
    rows=st.integers(1, 5),
    budget=st.integers(30, 80),
    leaving=st.lists(st.integers(0, 4), max_size=40),
)
def test_every_schedule_keeps_the_rules(
    module_of: ModuleOf, lengths: list[int], rows: int, budget: int, leaving: list[int]
) -> None:
    """Budgets hold, the queue keeps its order, and all requests are served in the end."""
    scheduler = make_scheduler(
        module_of, *lengths, max_num_seqs=rows, max_num_batched_tokens=budget
    )
    admitted: list[str] = []
    departures = iter(leaving)
    while batch := scheduler.schedule():
        if not batch.requests:
            break
        positions = len(batch.requests) * max(batch.num_scheduled_tokens)
        assert positions <= budget and len(scheduler.running) <= rows
        admitted += [r.request_id for r in batch.requests if r.num_computed_tokens == 0]
        run(batch)
        scheduler.check_invariants()
        # A request in a random row ends after most steps. Later, the first row ends in each step.
        index = next(departures, 0)
        if index < len(scheduler.running):
            scheduler.finish_request(scheduler.running[index], "stop")
            scheduler.check_invariants()
    assert admitted == [str(i) for i in range(len(lengths))]
    assert not scheduler.waiting and not scheduler.running
