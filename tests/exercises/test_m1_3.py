"""m1.3: tokens become outputs. `Scheduler.update_from_output`, `ModelRunner.free`, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from common import Request
from common.engine_core import EngineCoreOutput
from m1_single.schedule_batch import ScheduleBatch
from m1_single.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names
from tests.exercises.test_m1_2 import make_runner

CACHE: Any = object()  # stands for keys and values
EOS = 2  # the end-of-sequence token


def make_scheduler(use_cache: bool = True) -> Scheduler:
    return Scheduler(use_cache=use_cache)


def run(scheduler: Scheduler, name: str, prompt: int, max_tokens: int = 9) -> Request:
    """Let a request run that has computed nothing yet, and return it."""
    request = make_request(name, prompt, max_tokens=max_tokens)
    scheduler.running.append(request)
    return request


def update(
    scheduler: Scheduler, request: Request, count: int, token: int | None
) -> EngineCoreOutput:
    """Process a step that computed `count` tokens and sampled `token`; return its only output."""
    outputs = scheduler.update_from_output(ScheduleBatch([request], [count]), [(token, None)])
    got = names(output.request for output in outputs)
    assert got == request.request_id, "each request of the batch has one output, also its last one"
    return outputs[0]


def counters(scheduler: Scheduler) -> tuple[int, int, int]:
    counted = scheduler.counters
    return counted.num_steps, counted.prefill_tokens, counted.decode_tokens


def test_a_request_gets_its_token() -> None:
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3)
    output = update(scheduler, request, 3, 97)
    got = output.request, list(output.new_tokens), output.finish_reason
    assert got == (request, [(97, None)], None), "A gets its first of 9 output tokens, and goes on"
    assert request.token_ids == [1, 2, 3, 97], "97 must be appended for the next step"
    assert names(scheduler.running) == "A", "A still runs"


def test_what_was_computed_is_in_the_cache() -> None:
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3)
    update(scheduler, request, 3, 97)
    assert request.num_computed_tokens == 3, "I1: the sampled token was not computed"
    update(scheduler, request, 1, 98)
    assert request.num_computed_tokens == 4, "I1: 3 tokens, and then 1"


@pytest.mark.parametrize(
    ("use_cache", "counts", "expected"),
    [(True, (3, 1, 1), (3, 3, 2)), (False, (3, 4, 5), (3, 9, 3))],
    ids=["with a cache", "without a cache"],
)
def test_counters_show_what_recomputing_costs(
    use_cache: bool, counts: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    """Without the cache a step computes the prompt again and all output so far."""
    scheduler = make_scheduler(use_cache)
    request = run(scheduler, "A", 3)
    for count in counts:
        update(scheduler, request, count, 97)
    assert counters(scheduler) == expected, "steps, prompt tokens, and output tokens that were fed"
    assert use_cache or request.num_computed_tokens == 0, (
        "no KV was kept: the next step begins at 0"
    )


def test_an_empty_step_counts_for_nothing() -> None:
    scheduler = make_scheduler()
    outputs = scheduler.update_from_output(ScheduleBatch([], []), [])
    assert (outputs, counters(scheduler)) == ([], (0, 0, 0)), "it has no request"


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "reason"),
    [
        ([97, 98], 2, "length"),
        ([97], 1, "length"),  # the token of the prefill is the whole answer
        ([97, EOS], 9, "stop"),
        ([97, None], 9, "error"),
    ],
    ids=["two tokens", "one token", "end of sequence", "no valid token"],
)
def test_an_answer_ends(tokens: list[int | None], max_tokens: int, reason: str) -> None:
    """The last token is kept. If the logits are not finite, the sampler returns None for it."""
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3, max_tokens)
    request.stop_token_ids = frozenset([EOS])
    for count, token in zip((3, 1), tokens, strict=False):
        output = update(scheduler, request, count, token)
    assert (output.finish_reason, request.finish_reason) == (reason, reason), "A must end, and why"
    assert request.output_token_ids == [token for token in tokens if token is not None]
    assert names(scheduler.running) == "none", "I3: a request that has ended leaves"


def test_a_request_that_has_ended_leaves_its_queue() -> None:
    scheduler = make_scheduler()
    a = run(scheduler, "A", 3, max_tokens=1)
    scheduler.add_request(make_request("B", 2))
    update(scheduler, a, 3, 97)
    queues = names(scheduler.running), names(scheduler.waiting)
    assert queues == ("none", "B"), "I3: A has ended, and B waits"


def test_only_the_given_requests_lose_their_memory() -> None:
    """A request that is aborted while it waits has no keys and values. The others keep theirs."""
    runner = make_runner()
    a, b = make_request("A", 3, computed=3), make_request("B", 2)
    runner.past_key_values[a] = CACHE
    runner.free([b])
    assert (list(runner.past_key_values), a.num_computed_tokens) == ([a], 3), (
        "I1: A's keys and values are still needed, and its 3 tokens are computed"
    )
    runner.free([a])
    assert (list(runner.past_key_values), a.num_computed_tokens) == ([], 0), (
        "I1: A has no keys and values any more, so none of its tokens counts as computed"
    )
