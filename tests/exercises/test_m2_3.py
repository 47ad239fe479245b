"""m2.3: leaving, and taking a step back. `Scheduler.remove_request` and `undo`, plain data."""

from __future__ import annotations

from common import EngineConfig, Request
from m2_continuous.scheduler import ScheduleBatch, Scheduler
from tests.exercises.by_hand import make_request, names


def state(running: str = "", waiting: str = "", joined: str = "") -> Scheduler:
    """Who runs has a prompt of 5 tokens computed; who has joined owns a row and nothing more."""
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
    everybody = [*scheduler.running, *scheduler.waiting]
    return next(request for request in everybody if request.request_id == name)


def test_who_waits_leaves_the_queue_and_nothing_else() -> None:
    scheduler = state(running="A B", waiting="X Y Z")
    move = scheduler.remove_request(of(scheduler, "Y"))
    assert show(scheduler) == ("A B", "X Z", "A B"), (
        f"Y waited: running, waiting and rows are now A B, X Z, A B; got {show(scheduler)}"
    )
    assert move is None, f"Y had no row, so nothing moves; got {move}"


def test_who_runs_gives_its_row_back() -> None:
    scheduler = state(running="A B C", waiting="X")
    scheduler.remove_request(of(scheduler, "C"))
    assert show(scheduler) == ("A B", "X", "A B"), (
        f"I3: C ended: running, waiting and rows are now A B, X, A B; got {show(scheduler)}"
    )


def test_the_caller_learns_which_row_moves() -> None:
    scheduler = state(running="A B C")
    move = scheduler.remove_request(of(scheduler, "A"))
    assert move is not None and tuple(move) == (2, 0, 5), (
        f"A left row 0, C's 5 tokens go there from row 2: a move (2, 0, 5), not {move}"
    )
    assert show(scheduler) == ("B C", "nobody", "C B"), (
        f"I3: B C run, in the order in which they came, in rows C B; got {show(scheduler)}"
    )


def test_a_failed_prefill_waits_again_at_the_head() -> None:
    """In the order in which they came, before those that came later."""
    scheduler = state(joined="0 1 2", waiting="X Y")
    scheduler.undo(ScheduleBatch(list(scheduler.running), [3, 3, 3]))
    assert show(scheduler) == ("nobody", "0 1 2 X Y", "nobody"), (
        f"I5: 0 1 2 came before X Y and wait before them again, without rows; got {show(scheduler)}"
    )


def test_a_failed_prefill_leaves_nothing_behind() -> None:
    scheduler = state(joined="0 1")
    joined = list(scheduler.running)
    scheduler.undo(ScheduleBatch(joined, [3, 3]))
    rows = [request.row for request in joined]
    assert rows == [None, None], f"I3: who waits has no row; they believe {rows}"
    scheduler.check_invariants()


def test_a_failed_prefill_does_not_touch_who_runs() -> None:
    scheduler = state(running="A B", joined="0 1", waiting="X")
    scheduler.undo(ScheduleBatch(scheduler.running[2:], [3, 3]))
    assert show(scheduler) == ("A B", "0 1 X", "A B"), (
        f"A and B were not part of the failed step; got {show(scheduler)}"
    )
    computed = [request.num_computed_tokens for request in scheduler.running]
    assert computed == [5, 5], f"A and B keep what they have computed, 5 tokens each: {computed}"


def test_a_failed_decode_is_simply_repeated() -> None:
    scheduler = state(running="A B", waiting="X")
    scheduler.undo(ScheduleBatch(list(scheduler.running), [1, 1]))
    assert show(scheduler) == ("A B", "X", "A B"), (
        f"the keys and values of A and B are good: both run on; got {show(scheduler)}"
    )
