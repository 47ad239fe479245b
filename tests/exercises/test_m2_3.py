"""m2.3: removing a request, undoing a step. `finish_request`, `send_back`, `undo`; plain data."""

from __future__ import annotations

from common import EngineConfig, Request
from m2_continuous.schedule_batch import ScheduleBatch
from m2_continuous.scheduler import Scheduler
from tests.exercises.by_hand import make_request, names


def state(running: str = "", waiting: str = "", joined: str = "") -> Scheduler:
    """Return a scheduler with these requests.

    `running`: requests with 5 computed prompt tokens. `joined`: requests that have only a row.
    """
    scheduler = Scheduler(EngineConfig(max_model_len=100, max_num_seqs=8))
    for name in running.split():
        give_row(scheduler, make_request(name, 5, output=1, computed=5))
    for name in joined.split():
        give_row(scheduler, make_request(name, 3))
    for name in waiting.split():
        scheduler.add_request(make_request(name, 4))
    return scheduler


def give_row(scheduler: Scheduler, request: Request) -> None:
    request.row = len(scheduler.kv_cache.rows)
    scheduler.kv_cache.rows.append(request)
    scheduler.running.append(request)


def show(scheduler: Scheduler) -> tuple[str, str, str]:
    return names(scheduler.running), names(scheduler.waiting), names(scheduler.kv_cache.rows)


def of(scheduler: Scheduler, name: str) -> Request:
    live = [*scheduler.running, *scheduler.waiting]
    return next(request for request in live if request.request_id == name)


def test_a_waiting_request_leaves_the_queue_and_nothing_else() -> None:
    scheduler = state(running="A B", waiting="X Y Z")
    scheduler.finish_request(of(scheduler, "Y"), "abort")
    assert show(scheduler) == ("A B", "X Z", "A B"), (
        f"Y waited: running, waiting and rows are A B, X Z, A B now; got {show(scheduler)}"
    )
    moves = scheduler.kv_cache.moves
    assert not moves, f"Y had no row, so nothing moves; `moves` is {moves}"


def test_a_running_request_gives_its_row_back() -> None:
    scheduler = state(running="A B C", waiting="X")
    scheduler.finish_request(of(scheduler, "C"), "abort")
    assert show(scheduler) == ("A B", "X", "A B"), (
        f"I3: C has ended: running, waiting and rows are A B, X, A B now; got {show(scheduler)}"
    )


def test_the_runner_is_told_which_row_moves() -> None:
    scheduler = state(running="A B C")
    scheduler.finish_request(of(scheduler, "A"), "abort")
    moves = [tuple(move) for move in scheduler.kv_cache.moves]
    assert moves == [(2, 0, 5)], (
        f"A left row 0, and C's 5 tokens move there from row 2: Move(2, 0, 5), not {moves}"
    )
    assert show(scheduler) == ("B C", "none", "C B"), (
        f"I3: running is B C, in order of arrival, and the rows are C B; got {show(scheduler)}"
    )


def test_a_request_that_has_ended_says_why() -> None:
    scheduler = state(running="A", waiting="X")
    a, x = of(scheduler, "A"), of(scheduler, "X")
    scheduler.finish_request(a, "length")
    scheduler.finish_request(x, "abort")
    got = a.finish_reason, x.finish_reason
    assert got == ("length", "abort"), (
        f"A ended by length, and X was aborted: `finish_reason` must say so, not {got}"
    )


def test_a_request_that_is_sent_back_waits_before_all_others() -> None:
    scheduler = state(running="A B C", waiting="X")
    b = of(scheduler, "B")
    tokens = list(b.token_ids)
    scheduler.send_back(b)
    assert show(scheduler) == ("A C", "B X", "A C"), (
        f"I5: B came before X, and waits before X, without a row; got {show(scheduler)}"
    )
    assert (b.row, b.num_computed_tokens, b.token_ids) == (None, 0, tokens), (
        f"I3: B has no row, and none of its tokens counts as computed; it keeps its tokens: {b}"
    )
    moves = [tuple(move) for move in scheduler.kv_cache.moves]
    assert moves == [(2, 1, 5)], f"C's 5 tokens move from row 2 to B's row 1, not {moves}"
    scheduler.check_invariants()


def test_a_failed_prefill_waits_again_at_the_head() -> None:
    """The requests wait in order of arrival, before the requests that came later."""
    scheduler = state(joined="0 1 2", waiting="X Y")
    scheduler.undo(ScheduleBatch(list(scheduler.running), [3, 3, 3]))
    assert show(scheduler) == ("none", "0 1 2 X Y", "none"), (
        f"I5: 0 1 2 came before X Y, and wait before them, without rows; got {show(scheduler)}"
    )


def test_a_failed_prefill_leaves_nothing_behind() -> None:
    scheduler = state(joined="0 1")
    joined = list(scheduler.running)
    scheduler.undo(ScheduleBatch(joined, [3, 3]))
    rows = [request.row for request in joined]
    assert rows == [None, None], f"I3: a waiting request has no row; `row` is {rows}"
    scheduler.check_invariants()


def test_a_failed_prefill_does_not_touch_running_requests() -> None:
    scheduler = state(running="A B", joined="0 1", waiting="X")
    scheduler.undo(ScheduleBatch(scheduler.running[2:], [3, 3]))
    assert show(scheduler) == ("A B", "0 1 X", "A B"), (
        f"A and B were not part of the failed step; got {show(scheduler)}"
    )
    computed = [request.num_computed_tokens for request in scheduler.running]
    assert computed == [5, 5], f"A and B keep their 5 computed tokens each: {computed}"


def test_a_failed_decode_is_simply_repeated() -> None:
    scheduler = state(running="A B", waiting="X")
    scheduler.undo(ScheduleBatch(list(scheduler.running), [1, 1]))
    assert show(scheduler) == ("A B", "X", "A B"), (
        f"the keys and values of A and B are good: both still run; got {show(scheduler)}"
    )
