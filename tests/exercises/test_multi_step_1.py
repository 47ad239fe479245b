"""multi_step.1: a plan has several steps of the same requests, and ends where it must."""

from __future__ import annotations

from typing import Any

import pytest

from common import EngineConfig, Request, SamplingParams
from milestones.electives.multi_step.scheduler import Scheduler
from tests.exercises.by_hand import make_request

PAGE_SIZE = 4


def make_scheduler(num_pages: int = 32, **config: Any) -> Scheduler:
    """Return a scheduler without requests, with pages of 4 tokens and plans of up to 8 steps."""
    made = {
        "device": "cpu",
        "max_model_len": 200,
        "max_num_seqs": 8,
        "page_size": PAGE_SIZE,
        **config,
    }
    return Scheduler(EngineConfig(**made), num_pages)


def decoding(scheduler: Scheduler, *requests: Request) -> None:
    """Add requests and compute their prompts, as the first step of the engine does."""
    for request in requests:
        scheduler.add_request(request)
    batch = scheduler.schedule()
    scheduler.in_flight.advance(batch)
    scheduler.update_from_output(batch, [(7, None)] * len(batch.sampled_requests))


def plan(scheduler: Scheduler) -> list[list[str]]:
    """Plan as the engine does. Return the names of the requests of each step."""
    batches = [scheduler.schedule()]
    while scheduler.goes_on():
        batches.append(scheduler.schedule())
        assert len(batches) < 50, "I5: a plan of at most 8 steps has 50, and goes on"
    return [[request.request_id for request in batch.requests] for batch in batches]


def test_a_plan_has_num_steps_steps() -> None:
    scheduler = make_scheduler()
    decoding(scheduler, make_request("a", [1, 2]), make_request("b", [3]))
    assert plan(scheduler) == [["a", "b"]] * 8, "eight steps of both requests"


def test_a_plan_with_penalties_has_one_step() -> None:
    """I2: a penalty counts all tokens, and a placeholder stands only for the newest one."""
    scheduler, request = make_scheduler(), make_request("a", [1, 2])
    request.params = SamplingParams(max_tokens=50, temperature=0, presence_penalty=1.0)
    decoding(scheduler, request, make_request("b", [3]))
    assert plan(scheduler) == [["a", "b"]], "a has a penalty: each step needs the tokens before it"


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_length_of_a_plan_is_a_setting(num_steps: int) -> None:
    scheduler = make_scheduler()
    scheduler.num_steps = num_steps
    decoding(scheduler, make_request("a", [1, 2]))
    assert len(plan(scheduler)) == num_steps, "a plan has at most num_steps steps"


def test_a_request_leaves_the_plan_at_max_tokens() -> None:
    """I5: no step is planned for a request that is known to have ended before it."""
    scheduler = make_scheduler()
    decoding(
        scheduler, make_request("a", [1, 2], max_tokens=4), make_request("b", [3], max_tokens=6)
    )
    steps = plan(scheduler)
    expected = [["a", "b"]] * 3 + [["b"]] * 2
    assert steps == expected, "a needs 3 more tokens and b needs 5"


def test_nothing_is_planned_without_requests() -> None:
    scheduler = make_scheduler()
    assert not scheduler.goes_on(), "no step is in flight, so no plan can go on"


def test_a_plan_ends_before_a_half_computed_prompt() -> None:
    """The rest of a prompt is computed in the next plan, and not after seven more decodes."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    decoding(scheduler, make_request("a", [1, 2]))
    scheduler.add_request(make_request("long", [*range(20)], max_tokens=5))
    assert plan(scheduler) == [["a", "long"]], "the plan ends after the first chunk of the prompt"


def test_the_last_chunk_of_a_prompt_may_begin_a_plan() -> None:
    scheduler = make_scheduler()
    decoding(scheduler, make_request("a", [1, 2]))
    scheduler.add_request(make_request("new", [3, 4, 5]))
    assert plan(scheduler) == [["a", "new"]] * 8, "the whole prompt is computed in the first step"


def test_a_plan_ends_when_pages_are_short() -> None:
    """I5: a retraction needs the results, so the plan ends before it."""
    scheduler = make_scheduler(num_pages=4)
    scheduler.admission.new_token_ratio = 0.0  # both join, although the pool is small
    decoding(
        scheduler,
        make_request("a", [1, 2, 3], max_tokens=40),
        make_request("b", [4, 5, 6], max_tokens=40),
    )
    steps = plan(scheduler)
    assert len(steps) == 5, "two pages of four tokens have room for 5 steps"
    assert scheduler.kv_cache.num_free_pages == 0, "all pages are used before the plan ends"


def test_the_steps_own_pages_for_their_tokens() -> None:
    """I3: the pages of a plan are allocated before it is launched."""
    scheduler = make_scheduler()
    request = make_request("a", [1, 2])
    decoding(scheduler, request)
    plan(scheduler)
    pages = scheduler.kv_cache.pages_of(request)
    assert len(pages) == 3, "2 tokens and 8 more need 3 pages of 4"
