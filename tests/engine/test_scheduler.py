"""The scheduler of continuous batching in random schedules, with plain data and no model.

Single steps are in `tests/exercises/test_m2_2.py` and `test_m2_3.py`.
"""

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


def test_decode_respects_the_token_budget(module_of: ModuleOf) -> None:
    scheduler = make_scheduler(module_of, *[1] * 5, max_num_batched_tokens=3)
    run(scheduler.schedule())
    assert len(scheduler.schedule().requests) == 3


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
