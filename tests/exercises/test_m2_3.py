"""m2.3: removing a request, undoing a step. `finish_request`, `send_back`, `undo`; plain data."""

from __future__ import annotations

import pytest

from common import FinishReason, Request
from m2_continuous.schedule_batch import ScheduleBatch
from m2_continuous.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names
from tests.exercises.test_m2_2 import make_scheduler, run


def state(running: str = "", waiting: str = "", joined: str = "") -> Scheduler:
    """Return a scheduler with these requests.

    `running`: requests with 5 computed prompt tokens. `joined`: requests that have only a row.
    """
    scheduler = make_scheduler(running=running, max_num_seqs=8)
    for name in joined.split():
        run(scheduler, make_request(name, 3))
    for name in waiting.split():
        scheduler.add_request(make_request(name, 4))
    return scheduler


def show(scheduler: Scheduler) -> tuple[str, str, str]:
    return names(scheduler.running), names(scheduler.waiting), names(scheduler.kv_cache.rows)


def of(scheduler: Scheduler, name: str) -> Request:
    live = [*scheduler.running, *scheduler.waiting]
    return next(request for request in live if request.request_id == name)


# Why: what runs, waits and ends; running, waiting and rows after that, and the moves.
ENDS = {
    "Y waited and had no row": ("A B", "X Y Z", "Y", ("A B", "X Z", "A B"), []),
    "I3: C had the last row": ("A B C", "X", "C", ("A B", "X", "A B"), []),
    "I3: C moves to A's row, and B is still older": (
        "A B C", "", "A", ("B C", "none", "C B"), [(2, 0, 5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", ENDS)
@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_request_that_has_ended_leaves(why: str, reason: FinishReason) -> None:
    running, waiting, name, expected, moves = ENDS[why]
    scheduler = state(running, waiting)
    request = of(scheduler, name)
    scheduler.finish_request(request, reason)
    assert show(scheduler) == expected, f"{why}: running, waiting, and rows"
    assert [tuple(move) for move in scheduler.kv_cache.moves] == moves, "source, target, tokens"
    assert request.finish_reason == reason, "a request that has ended says why"


def test_a_request_that_is_sent_back_waits_before_all_others() -> None:
    scheduler = state(running="A B C", waiting="X")
    b = of(scheduler, "B")
    tokens = list(b.token_ids)
    scheduler.send_back(b)
    assert show(scheduler) == ("A C", "B X", "A C"), (
        "I5: B came before X, and waits before X, without a row"
    )
    assert (b.row, b.num_computed_tokens, b.token_ids) == (None, 0, tokens), (
        f"I3: B has no row, and none of its tokens counts as computed; it keeps its tokens: {b}"
    )
    moves = [tuple(move) for move in scheduler.kv_cache.moves]
    assert moves == [(2, 1, 5)], "C's 5 tokens move from row 2 to B's row 1"
    scheduler.check_invariants()


def test_a_failed_prefill_waits_again_at_the_head() -> None:
    """The requests wait in order of arrival, before the requests that came later."""
    scheduler = state(joined="0 1 2", waiting="X Y")
    joined = list(scheduler.running)
    scheduler.undo(ScheduleBatch(joined, [3, 3, 3]))
    assert show(scheduler) == ("none", "0 1 2 X Y", "none"), (
        "I5: 0 1 2 came before X Y, and wait before them, without rows"
    )
    assert [request.row for request in joined] == [None] * 3, "I3: a waiting request has no row"
    scheduler.check_invariants()


def test_a_failed_prefill_does_not_touch_running_requests() -> None:
    scheduler = state(running="A B", joined="0 1", waiting="X")
    scheduler.undo(ScheduleBatch(scheduler.running[2:], [3, 3]))
    assert show(scheduler) == ("A B", "0 1 X", "A B"), "A and B were not part of the failed step"
    computed = [request.num_computed_tokens for request in scheduler.running]
    assert computed == [5, 5], "A and B keep their 5 computed tokens each"


def test_a_request_that_starts_again_joins_too() -> None:
    """R has output from before, and lost its row: its prefill failed like that of a new request."""
    scheduler = state(running="A", waiting="X")
    run(scheduler, make_request("R", 3, output=2))
    scheduler.undo(ScheduleBatch(scheduler.running[1:], [5]))
    assert show(scheduler) == ("A", "R X", "A"), (
        "I3: R joined with the failed batch, and none of its 5 tokens is computed: it waits again"
    )


def test_a_failed_decode_is_simply_repeated() -> None:
    scheduler = state(running="A B", waiting="X")
    scheduler.undo(ScheduleBatch(list(scheduler.running), [1, 1]))
    assert show(scheduler) == ("A B", "X", "A B"), (
        "the keys and values of A and B are good: both still run"
    )
