"""m5.3: a step completes or is undone; an ended request is freed after the last step with it."""

from __future__ import annotations

from m5_overlap.in_flight import StepsInFlight, continuing
from m5_overlap.placeholders import placeholder
from tests.exercises.overlap_states import (
    NUM_PAGES,
    audit,
    decoding,
    end,
    plan,
    running,
    steps_in_flight,
)


def all_pages_can_be_had(steps: StepsInFlight) -> bool:
    return steps.kv_cache.num_free_pages == NUM_PAGES


def test_a_request_that_is_known_to_end_is_not_planned_again() -> None:
    """Step N gives both requests a token, and it is the last one of the first request."""
    steps, (last, other) = decoding("ab")
    last.max_num_tokens = 4
    assert continuing([last, other]) == [last, other], "neither has reached its length"
    steps.advance(plan(steps, last, other))
    assert continuing([last, other]) == [other], (
        "a placeholder counts as a token, so the first request has all of its 4"
    )


def test_the_placeholder_goes_and_the_length_stays() -> None:
    """A chunk in the middle of a prompt has no placeholder to lose."""
    steps, (decode,) = decoding("a")
    chunk = running(steps, "b", [1, 2, 3, 4, 5, 6], computed=0)
    batch = plan(steps, decode, (chunk, 4))
    steps.advance(batch)
    steps.complete(batch)
    assert decode.token_ids == [1, 2, 3], (
        "`update_from_output` appends the token next, so complete removes the placeholder"
    )
    assert decode.num_computed_tokens == 3, "the step has computed the third token"
    assert chunk.token_ids == [1, 2, 3, 4, 5, 6], "I1: a chunk has no placeholder"
    assert not steps.batches, "the step is no longer in flight"
    audit(steps, [decode, chunk], "after complete of a decode and a chunk")


def test_a_request_that_ended_meanwhile_keeps_its_last_token() -> None:
    """It ended in step N. It is in step N+1 too, but has no placeholder that could be removed."""
    steps, (ended,) = decoding("a")
    batch = plan(steps, ended)
    end(steps, ended)
    batch.is_advanced = True
    steps.complete(batch)
    assert ended.token_ids == [1, 2, 3], (
        "the request had ended before this step was advanced, so it has no placeholder, and "
        "complete removed a real token"
    )


def test_pages_are_held_while_a_step_in_flight_writes_them() -> None:
    steps, (ended,) = decoding("a")
    pages = list(steps.kv_cache.pages_of(ended))
    batch = plan(steps, ended)
    end(steps, ended)
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
    steps, (aborted, other) = decoding("ab")
    plan(steps, other)
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
    end(steps, ended)
    steps.complete(first)
    assert steps.finished == [ended] and ended.row is not None, (
        "I3: the request was in two steps, and the second step has not ended"
    )
    second.is_advanced = True
    steps.complete(second)
    assert steps.finished == [] and all_pages_can_be_had(steps), (
        "I3: both steps have ended, so no step writes to the pages of the request: they are free"
    )
    audit(steps, [], "after the second of two steps that held an aborted request")


def test_the_first_of_two_steps_counts_too() -> None:
    """The request takes no part in step N+1, and step N still writes to its pages."""
    steps, (aborted, other) = decoding("ab")
    first = plan(steps, aborted, other)
    steps.advance(first)
    plan(steps, other)
    end(steps, aborted)
    assert steps.finished == [aborted] and aborted.row is not None, (
        "I3: the request is in the older of the two steps in flight, which has not ended"
    )


def test_one_request_is_freed_and_the_others_stay() -> None:
    steps, (early, late, lives) = decoding("abc")
    first = plan(steps, early)
    second = plan(steps, late, lives)
    end(steps, early, late)
    first.is_advanced = True
    steps.complete(first)
    assert steps.finished == [late], "only the last step of the first request has ended"
    lives.num_computed_tokens += 1  # the second step is advanced for its live request
    lives.token_ids.append(placeholder(lives.row))
    second.is_advanced = True
    steps.complete(second)
    assert steps.finished == [], "I3: no step in flight has one of the two: both are freed"
    assert lives.row is not None, "the third request goes on, and keeps its row"
    audit(steps, [lives], "after two of three requests were freed, a step apart")


def test_a_step_that_was_not_computed_is_undone() -> None:
    """The step failed before it was advanced: it only leaves the steps in flight."""
    steps, (request,) = decoding("a")
    steps.undo(plan(steps, request))
    assert not steps.batches, "the step is no longer in flight"
    assert (request.num_computed_tokens, request.token_ids) == (2, [1, 2, 3]), (
        "the step was not advanced, so its request is in the state before it already"
    )


def test_a_step_that_was_advanced_is_undone_whole() -> None:
    steps, (decode,) = decoding("a")
    chunk = running(steps, "b", [4, 5, 6, 7, 8], computed=0)
    batch = plan(steps, decode, (chunk, 3))
    steps.advance(batch)
    steps.undo(batch)
    assert (decode.num_computed_tokens, decode.token_ids) == (2, [1, 2, 3]), (
        "I3: the state before the step: its token is not computed, and it has no placeholder"
    )
    assert (chunk.num_computed_tokens, chunk.token_ids) == (0, [4, 5, 6, 7, 8]), (
        "the chunk is not computed, and the prompt is unchanged"
    )


def test_two_steps_are_undone_newest_first() -> None:
    steps, (request,) = decoding("a")
    first = plan(steps, request)
    steps.advance(first)
    second = plan(steps, request)
    steps.undo(second)
    assert (request.num_computed_tokens, request.num_tokens) == (3, 4), "the state after step N"
    left = ["first" if batch is first else "second" for batch in steps.batches]
    assert left == ["first"], "the second step was undone, and the first is in flight"
    steps.undo(first)
    assert (request.num_computed_tokens, request.token_ids) == (2, [1, 2, 3]), (
        "both steps were undone: the request is in the state before step N"
    )
    assert not steps.batches, "no step is in flight"


def test_undo_leaves_an_ended_request_alone_and_frees_it() -> None:
    steps, (ended,) = decoding("a")
    batch = plan(steps, ended)
    end(steps, ended)
    batch.is_advanced = True
    steps.undo(batch)
    assert ended.token_ids == [1, 2, 3], (
        "the request had ended before this step was advanced: it has no placeholder to lose"
    )
    assert steps.finished == [], "I3: its last step was undone: its memory is free"
    assert all_pages_can_be_had(steps), "I3: no step in flight has the request: its memory is free"
    audit(steps, [], "after the step of an aborted request was undone")


def test_all_that_end_in_one_step_are_freed() -> None:
    """I3: the list of finished requests must not lose one of them while it is gone through."""
    steps, ended = decoding("abcd")
    batch = plan(steps, *ended)
    steps.advance(batch)
    end(steps, *ended)
    assert steps.finished == ended, "a step in flight writes to the pages of all four"
    steps.complete(batch)
    assert steps.finished == [], "I3: no step writes to them, and they hold pages"
    assert all_pages_can_be_had(steps), "I3: four requests have ended, and not all pages are free"
    assert [request.row for request in ended] == [None] * 4, "I3: a row is held"
