"""m5.3: a step completes or is undone; an ended request is freed after the last step with it."""

from __future__ import annotations

from m5_overlap.in_flight import StepsInFlight, continuing
from m5_overlap.placeholders import placeholder
from tests.exercises.overlap_states import (
    NUM_PAGES,
    audit,
    plan,
    running,
    steps_in_flight,
)


def all_pages_can_be_had(steps: StepsInFlight) -> bool:
    return steps.kv_cache.num_free_pages == NUM_PAGES


def test_a_request_that_is_known_to_end_is_not_planned_again() -> None:
    """Step N gives both requests a token, and it is the last one of the first request."""
    steps = steps_in_flight()
    last = running(steps, "last", [1, 2, 3], computed=2)
    last.max_num_tokens = 4
    other = running(steps, "other", [1, 2, 3], computed=2)
    assert continuing([last, other]) == [last, other], "neither has reached its length"
    steps.advance(plan(steps, (last, 1), (other, 1)))
    assert continuing([last, other]) == [other], (
        "a placeholder counts as a token, so the first request has all of its 4"
    )


def test_the_placeholder_goes_and_the_length_stays() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3], computed=2)
    batch = plan(steps, (request, 1))
    steps.advance(batch)
    steps.complete(batch)
    assert request.token_ids == [1, 2, 3], (
        "`update_from_output` appends the token next, so complete removes the placeholder"
    )
    assert request.num_computed_tokens == 3, "the step has computed the third token"
    assert not steps.batches, "the step is no longer in flight"
    audit(steps, [request], "after complete of a decode")


def test_a_chunk_has_no_placeholder_to_lose() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3, 4, 5, 6], computed=0)
    batch = plan(steps, (request, 4))
    steps.advance(batch)
    steps.complete(batch)
    assert request.token_ids == [1, 2, 3, 4, 5, 6], (
        "I1: a chunk in the middle of a prompt has no placeholder"
    )
    audit(steps, [request], "after complete of a chunk")


def test_a_request_that_ended_meanwhile_keeps_its_last_token() -> None:
    """It ended in step N. It is in step N+1 too, but has no placeholder that could be removed."""
    steps = steps_in_flight()
    ended = running(steps, "a", [1, 2, 3], computed=2)
    batch = plan(steps, (ended, 1))
    ended.finish_reason = "stop"
    steps.free(ended)
    batch.is_advanced = True
    steps.complete(batch)
    assert ended.token_ids == [1, 2, 3], (
        "the request had ended before this step was advanced, so it has no placeholder, and "
        "complete removed a real token"
    )


def test_pages_are_held_while_a_step_in_flight_writes_them() -> None:
    steps = steps_in_flight()
    ended = running(steps, "a", [1, 2, 3], computed=2)
    pages = list(steps.kv_cache.pages_of(ended))
    batch = plan(steps, (ended, 1))
    ended.finish_reason = "stop"
    steps.free(ended)
    assert steps.finished == [ended] and ended.row is not None, (
        "I3: step N+1 is in flight and writes to this row's pages; no other request may get them"
    )
    assert not set(pages) & set(steps.kv_cache.allocator.free_pages)
    batch.is_advanced = True
    steps.complete(batch)
    assert steps.finished == [] and ended.row is None, "the step has ended: row and pages are free"
    assert all_pages_can_be_had(steps)
    audit(steps, [], "after the last step of a request that had ended")


def test_a_request_that_is_in_no_step_is_freed_at_once() -> None:
    steps = steps_in_flight()
    aborted, other = (running(steps, name, [i, i, i], computed=2) for i, name in enumerate("ab"))
    plan(steps, (other, 1))
    steps.free(aborted)
    assert steps.finished == [] and aborted.row is None, (
        "no step in flight has it: its row and pages become free at once"
    )
    audit(steps, [other], "after free of a request that is in no step")


def test_the_last_of_two_steps_counts() -> None:
    steps = steps_in_flight()
    ended = running(steps, "a", [1, 2, 3, 4, 5, 6], computed=0)
    first = plan(steps, (ended, 2))
    steps.advance(first)
    second = plan(steps, (ended, 2))
    ended.finish_reason = "abort"
    steps.free(ended)
    steps.complete(first)
    assert steps.finished == [ended] and ended.row is not None, (
        "I3: the request was in two steps, and the second step has not ended"
    )
    second.is_advanced = True
    steps.complete(second)
    assert steps.finished == [] and all_pages_can_be_had(steps)
    audit(steps, [], "after the second of two steps that held an aborted request")


def test_one_request_is_freed_and_the_others_stay() -> None:
    steps = steps_in_flight()
    early, late, lives = (running(steps, n, [i, i, i], computed=2) for i, n in enumerate("abc"))
    first = plan(steps, (early, 1))
    second = plan(steps, (late, 1), (lives, 1))
    for request in (early, late):
        request.finish_reason = "stop"
        steps.free(request)
    first.is_advanced = True
    steps.complete(first)
    assert steps.finished == [late], "only the last step of the first request has ended"
    lives.num_computed_tokens += 1  # the second step is advanced for its live request
    lives.token_ids.append(placeholder(lives.row))
    second.is_advanced = True
    steps.complete(second)
    assert steps.finished == [] and lives.row is not None
    audit(steps, [lives], "after two of three requests were freed, a step apart")


def test_a_step_that_was_not_computed_is_undone() -> None:
    """The step failed before it was advanced: it only leaves the steps in flight."""
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3], computed=2)
    batch = plan(steps, (request, 1))
    steps.undo(batch)
    assert not steps.batches, "the step is no longer in flight"
    assert (request.num_computed_tokens, request.token_ids) == (2, [1, 2, 3]), (
        "the step was not advanced, so its request is in the state before it already: "
        f"{request.num_computed_tokens} computed of {request.token_ids}"
    )


def test_a_step_that_was_advanced_is_undone_whole() -> None:
    steps = steps_in_flight()
    decode = running(steps, "a", [1, 2, 3], computed=2)
    chunk = running(steps, "b", [4, 5, 6, 7, 8], computed=0)
    batch = plan(steps, (decode, 1), (chunk, 3))
    steps.advance(batch)
    steps.undo(batch)
    assert (decode.num_computed_tokens, decode.token_ids) == (2, [1, 2, 3]), (
        "I3: the state before the step: its token is not computed, and it has no placeholder"
    )
    assert (chunk.num_computed_tokens, chunk.token_ids) == (0, [4, 5, 6, 7, 8]), (
        "the chunk is not computed, and the prompt is unchanged"
    )


def test_two_steps_are_undone_newest_first() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3], computed=2)
    first = plan(steps, (request, 1))
    steps.advance(first)
    second = plan(steps, (request, 1))
    steps.undo(second)
    assert (request.num_computed_tokens, request.num_tokens) == (3, 4), "the state after step N"
    left = ["first" if batch is first else "second" for batch in steps.batches]
    assert left == ["first"], f"the second step was undone, but the steps in flight are {left}"
    steps.undo(first)
    assert (request.num_computed_tokens, request.token_ids) == (2, [1, 2, 3])
    assert not steps.batches


def test_undo_leaves_an_ended_request_alone_and_frees_it() -> None:
    steps = steps_in_flight()
    ended = running(steps, "a", [1, 2, 3], computed=2)
    batch = plan(steps, (ended, 1))
    ended.finish_reason = "abort"
    steps.free(ended)
    batch.is_advanced = True
    steps.undo(batch)
    assert ended.token_ids == [1, 2, 3] and steps.finished == []
    assert all_pages_can_be_had(steps), "I3: no step in flight has the request: its memory is free"
    audit(steps, [], "after the step of an aborted request was undone")


def test_all_that_end_in_one_step_are_freed() -> None:
    """I3: the list of finished requests must not lose one of them while it is gone through."""
    steps = steps_in_flight()
    ended = [running(steps, name, [1, 2, 3], computed=2) for name in "abcd"]
    batch = plan(steps, *((request, 1) for request in ended))
    steps.advance(batch)
    for request in ended:
        request.finish_reason = "stop"
        steps.free(request)
    assert steps.finished == ended, "a step in flight writes to the pages of all four"
    steps.complete(batch)
    assert steps.finished == [], f"I3: no step writes to {steps.finished}, and they hold pages"
    assert all_pages_can_be_had(steps), "I3: four requests have ended, and not all pages are free"
    assert [request.row for request in ended] == [None] * 4, "I3: a row is held"
