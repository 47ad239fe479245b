"""m3.4: retraction. `Scheduler.make_room`, `retract` and `send_back`, plain data."""

from __future__ import annotations

import pytest

from tests.exercises.by_hand import names
from tests.exercises.paged_states import make_scheduler, run, show, wait


def test_no_request_gives_way_while_a_page_is_free() -> None:
    scheduler = make_scheduler(4)
    a, _ = run(scheduler, "A", 8), run(scheduler, "B", 4)
    scheduler.make_room(a)
    assert (names(scheduler.running), scheduler.counters.num_retractions) == ("A B", 0), (
        f"A needs a page and one is free: no request is retracted; {show(scheduler)}"
    )


def test_no_request_gives_way_while_the_last_page_has_room() -> None:
    scheduler = make_scheduler(3)
    a, _ = run(scheduler, "A", 7), run(scheduler, "B", 4)
    scheduler.make_room(a)
    assert (names(scheduler.running), scheduler.counters.num_retractions) == ("A B", 0), (
        f"no page is free, but A's second page has an unused slot: no request is retracted; "
        f"{show(scheduler)}"
    )


def test_the_newest_gives_way() -> None:
    scheduler = make_scheduler(5)
    a, _, _ = run(scheduler, "A", 8), run(scheduler, "B", 8), run(scheduler, "C", 4)
    scheduler.make_room(a)
    assert names(scheduler.running) == "A B", (
        f"I5: A needs a page and none is free: C, the newest, is retracted; {show(scheduler)}"
    )
    assert names(scheduler.waiting) == "C", f"I3: C must wait again; {show(scheduler)}"
    assert scheduler.counters.num_retractions == 1, (
        f"one retraction, not {scheduler.counters.num_retractions}"
    )


def test_as_many_give_way_as_it_takes() -> None:
    """C has just been admitted and holds no page yet: retracting C alone frees no page."""
    scheduler = make_scheduler(4)
    a, _, _ = (
        run(scheduler, "A", 8),
        run(scheduler, "B", 8),
        run(scheduler, "C", 6, output=0, computed=0),
    )
    scheduler.make_room(a)
    assert names(scheduler.running) == "A", (
        f"C had no pages, so B is retracted too; {show(scheduler)}"
    )
    assert names(scheduler.waiting) == "B C", (
        f"I5: B came before C, and waits before C; {show(scheduler)}"
    )


def test_no_more_give_way_than_it_takes() -> None:
    scheduler = make_scheduler(5)
    a, _, _ = run(scheduler, "A", 8), run(scheduler, "B", 4), run(scheduler, "C", 8)
    scheduler.make_room(a)
    assert names(scheduler.running) == "A B", (
        f"C's pages are enough, so B still runs; {show(scheduler)}"
    )


def test_the_newest_gives_way_to_itself_last() -> None:
    """B is the newest: it loses its own memory, and an older request keeps its memory."""
    scheduler = make_scheduler(4)
    run(scheduler, "A", 8)
    b = run(scheduler, "B", 8)
    scheduler.make_room(b)
    assert (names(scheduler.running), b.row) == ("A", None), (
        f"I5: B is the newest, and no page is free: B itself is retracted; {show(scheduler)}"
    )


def test_a_retracted_request_keeps_its_tokens_and_nothing_else() -> None:
    scheduler = make_scheduler(4)
    a, b = run(scheduler, "A", 8), run(scheduler, "B", 4, output=5)
    tokens = list(b.token_ids)
    scheduler.make_room(a)
    assert b.token_ids == tokens, (
        f"I2: the caller has seen B's 5 output tokens: they must stay {tokens}, not become "
        f"{b.token_ids}"
    )
    assert (b.row, b.num_computed_tokens) == (None, 0), (
        f"I3: B must have no row and 0 computed tokens: its row is {b.row}, "
        f"{b.num_computed_tokens} tokens count as computed"
    )
    assert scheduler.kv_cache.num_free_pages == 2, (
        f"I3: B's 2 pages must be free; {show(scheduler)}"
    )
    scheduler.check_invariants()


def test_a_retracted_request_waits_before_all_others() -> None:
    scheduler = make_scheduler(4)
    a, _ = run(scheduler, "A", 8), run(scheduler, "B", 8)
    wait(scheduler, "X", 3)
    wait(scheduler, "Y", 3)
    scheduler.make_room(a)
    assert names(scheduler.waiting) == "B X Y", (
        f"I5: B came before X and Y, and waits before them; {show(scheduler)}"
    )


@pytest.mark.parametrize("before", [0.1, 0.3, 0.9, 1.0])
def test_a_retraction_makes_admission_less_hopeful(before: float) -> None:
    """A and B have generated 30 of 40 tokens each: a lower ratio was wrong."""
    scheduler = make_scheduler(18)
    scheduler.admission.new_token_ratio = before
    a = run(scheduler, "A", 7, output=30, computed=36, max_tokens=40)
    run(scheduler, "B", 7, output=30, computed=36, max_tokens=40)
    scheduler.make_room(a)
    after = scheduler.admission.new_token_ratio
    assert max(before, 0.75) <= after <= 1.0, (
        f"new_token_ratio was {before}, and A and B have generated 0.75 of their tokens: after a "
        f"retraction the ratio must be from {max(before, 0.75)} to 1, not {after}"
    )


def test_the_retracted_request_counts_too() -> None:
    """A runs alone: the new ratio can only come from the tokens of A itself."""
    scheduler = make_scheduler(20)
    scheduler.admission.new_token_ratio = 0.1
    a = run(scheduler, "A", 7, output=30, computed=36, max_tokens=100)
    scheduler.retract(a)
    assert scheduler.admission.new_token_ratio == pytest.approx(0.5), (
        f"A has 30 of 100 tokens and 20 more are expected: 0.5. The retracted request counts; "
        f"the ratio is {scheduler.admission.new_token_ratio}"
    )


def test_a_retraction_while_little_is_generated_does_not_lower_the_ratio() -> None:
    scheduler = make_scheduler(4)
    scheduler.admission.new_token_ratio = 0.7
    a, _ = run(scheduler, "A", 8, max_tokens=150), run(scheduler, "B", 8, max_tokens=150)
    scheduler.make_room(a)
    assert scheduler.admission.new_token_ratio >= 0.7, (
        f"memory ran out at 0.7: the ratio must not fall to {scheduler.admission.new_token_ratio}"
    )
