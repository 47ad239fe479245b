"""m1.3: tokens become outputs. `Scheduler.update_from_output`, `ModelRunner.free`, by hand."""

from __future__ import annotations

from typing import Any

from common import Request
from common.engine_core import EngineCoreOutput
from m1_single.schedule_batch import ScheduleBatch
from m1_single.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names
from tests.exercises.test_m1_2 import make_runner

CACHE: Any = object()  # stands for keys and values


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
    batch = ScheduleBatch([request], [count])
    (output,) = scheduler.update_from_output(batch, [(token, None)])
    return output


def counters(scheduler: Scheduler) -> tuple[int, int, int]:
    counted = scheduler.counters
    return counted.num_steps, counted.prefill_tokens, counted.decode_tokens


def test_a_request_gets_its_token() -> None:
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3)
    output = update(scheduler, request, 3, 97)
    got = output.request, list(output.new_tokens), output.finish_reason
    assert got == (request, [(97, None)], None), (
        f"A gets token 97, has 1 of 9 output tokens and goes on: {output}"
    )
    assert request.token_ids == [1, 2, 3, 97], (
        f"97 must be appended for the next step: {request.token_ids}"
    )
    assert names(scheduler.running) == "A", f"A still runs: {names(scheduler.running)}"


def test_what_was_computed_is_in_the_cache() -> None:
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3)
    update(scheduler, request, 3, 97)
    assert request.num_computed_tokens == 3, (
        f"I1: 3 tokens were computed, and the sampled one was not: {request.num_computed_tokens}"
    )
    update(scheduler, request, 1, 98)
    assert request.num_computed_tokens == 4, f"I1: 3 + 1, not {request.num_computed_tokens}"


def test_without_the_cache_nothing_counts_as_computed() -> None:
    scheduler = make_scheduler(use_cache=False)
    request = run(scheduler, "A", 3)
    update(scheduler, request, 3, 97)
    assert request.num_computed_tokens == 0, (
        f"no KV was kept, so the next step begins at 0, not at {request.num_computed_tokens}"
    )


def test_counters_tell_prompt_from_output() -> None:
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3)
    for count, token, expected in ((3, 97, (1, 3, 0)), (1, 98, (2, 3, 1)), (1, 99, (3, 3, 2))):
        update(scheduler, request, count, token)
        assert counters(scheduler) == expected, (
            f"(steps, prompt tokens, output tokens fed) is {expected}, not {counters(scheduler)}"
        )


def test_counters_show_what_recomputing_costs() -> None:
    """Without the cache a step computes the prompt again and all output so far."""
    scheduler = make_scheduler(use_cache=False)
    request = run(scheduler, "A", 3)
    for count in (3, 4, 5):
        update(scheduler, request, count, 97)
    assert counters(scheduler) == (3, 9, 3), (
        f"three steps, 3 times 3 prompt tokens, 0 + 1 + 2 output tokens; not {counters(scheduler)}"
    )


def test_an_empty_step_counts_for_nothing() -> None:
    scheduler = make_scheduler()
    outputs = scheduler.update_from_output(ScheduleBatch([], []), [])
    assert (outputs, counters(scheduler)) == ([], (0, 0, 0)), f"{outputs}, {counters(scheduler)}"


def test_a_request_that_ends_by_length_keeps_its_last_token() -> None:
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3, max_tokens=2)
    update(scheduler, request, 3, 97)
    output = update(scheduler, request, 1, 98)
    got = output.finish_reason, request.finish_reason, request.output_token_ids
    assert got == ("length", "length", [97, 98]), (
        f"max_tokens=2: A ends by length with both tokens, not {got}"
    )


def test_one_token_needs_one_step() -> None:
    scheduler = make_scheduler()
    output = update(scheduler, run(scheduler, "A", 3, max_tokens=1), 3, 97)
    assert output.finish_reason == "length", (
        f"max_tokens=1: the token of the prefill is the whole answer; {output}"
    )


def test_a_request_that_has_ended_leaves_its_queue() -> None:
    scheduler = make_scheduler()
    a = run(scheduler, "A", 3, max_tokens=1)
    scheduler.add_request(make_request("B", 2))
    update(scheduler, a, 3, 97)
    got = names(scheduler.running), names(scheduler.waiting)
    assert got == ("none", "B"), f"I3: A has ended and B waits; running {got[0]}, waiting {got[1]}"


def test_a_stop_token_ends_a_request() -> None:
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3)
    request.stop_token_ids = frozenset([2])  # the end-of-sequence token
    output = update(scheduler, request, 3, 2)
    assert output.finish_reason == "stop" and not scheduler.running, (
        f"I3: A sampled an end-of-sequence token and must end: {output}"
    )


def test_a_request_without_a_valid_token_ends_with_an_error() -> None:
    """The model's logits were not finite: the sampler returns None in place of a token."""
    scheduler = make_scheduler()
    request = run(scheduler, "A", 3)
    output = update(scheduler, request, 3, None)
    got = output.finish_reason, request.token_ids, names(scheduler.running)
    assert got == ("error", [1, 2, 3], "none"), (
        f"I3: there is no token to go on with: A ends with an error and leaves; {got}"
    )


def test_only_the_given_requests_lose_their_memory() -> None:
    """A request that is aborted while it waits has no keys and values. The others keep theirs."""
    runner = make_runner()
    a, b = make_request("A", 3, computed=3), make_request("B", 2)
    runner.past_key_values[a] = CACHE
    runner.free([b])
    assert (list(runner.past_key_values), a.num_computed_tokens) == ([a], 3), (
        f"I1: A's keys and values are still needed, and its 3 tokens are computed: {a}"
    )


def test_a_request_without_its_keys_begins_anew() -> None:
    runner = make_runner()
    request = make_request("A", 3, computed=3)
    runner.past_key_values[request] = CACHE
    runner.free([request])
    assert request not in runner.past_key_values and request.num_computed_tokens == 0, (
        f"I1: A has no keys and values, so none of its tokens counts as computed: {request}"
    )
    runner.free([request])  # a request without keys and values, too
