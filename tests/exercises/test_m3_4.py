"""m3.4: retraction. `Scheduler.retract_for`, `retract` and `send_back`, plain data."""

from __future__ import annotations

import pytest

from tests.exercises.by_hand import names
from tests.exercises.paged_states import make_scheduler, run, show, wait

# Why: the pages of the pool, the computed tokens of each request, the request that needs a page,
# and the requests that run and wait after that.
CASES: dict[str, tuple[int, dict[str, int], str, str, str]] = {
    "one page is free": (4, {"A": 8, "B": 4}, "A", "A B", "none"),
    "A's second page has an unused slot": (3, {"A": 7, "B": 4}, "A", "A B", "none"),
    "I5: C is the newest": (5, {"A": 8, "B": 8, "C": 4}, "A", "A B", "C"),
    "I5: C holds no page yet, so B gives way too, and waits before C": (
        4, {"A": 8, "B": 8, "C": 0}, "A", "A", "B C",
    ),
    "C's pages are enough, so B still runs": (5, {"A": 8, "B": 4, "C": 8}, "A", "A B", "C"),
    "I5: B is the newest itself, and older requests keep their memory": (
        4, {"A": 8, "B": 8}, "B", "A", "B",
    ),
    "I5: C has a row, no page, and is the newest itself: A and B keep their memory": (
        4, {"A": 8, "B": 8, "C": 0}, "C", "A B", "C",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", CASES)
def test_the_newest_gives_way(why: str) -> None:
    """As many requests are retracted as it takes, and no more."""
    pages, lengths, name, running, waiting = CASES[why]
    scheduler = make_scheduler(pages)
    requests = {
        name: run(scheduler, name, length or 6, output=int(length > 0), computed=length)
        for name, length in lengths.items()
    }
    scheduler.retract_for(requests[name])
    queues = names(scheduler.running), names(scheduler.waiting)
    assert queues == (running, waiting), f"{why}; {show(scheduler)}"
    assert scheduler.counters.num_retractions == len(scheduler.waiting), "each is counted"
    assert all(request.row is None for request in scheduler.waiting), "I3: it gives its row back"


def test_a_retracted_request_keeps_its_tokens_and_nothing_else() -> None:
    scheduler = make_scheduler(4)
    a, b = run(scheduler, "A", 8), run(scheduler, "B", 4, output=5)
    tokens = list(b.token_ids)
    scheduler.retract_for(a)
    assert b.token_ids == tokens, "I2: the caller has seen B's 5 output tokens: they must stay"
    assert (b.row, b.num_computed_tokens) == (None, 0), "I3: B has no row and 0 computed tokens"
    assert scheduler.kv_cache.num_free_pages == 2, "I3: B's 2 pages must be free"
    scheduler.check_invariants()


def test_room_for_one_token_is_enough() -> None:
    """A is in the middle of its prompt: it computes a smaller chunk, and B keeps its memory."""
    scheduler = make_scheduler(6)
    a, _ = run(scheduler, "A", 30, output=0, computed=12), run(scheduler, "B", 8)
    scheduler.retract_for(a)
    assert names(scheduler.running) == "A B", (
        f"one page is free, and A can compute 4 of its 18 tokens left; {show(scheduler)}"
    )


def test_a_request_of_a_failed_step_is_not_retracted() -> None:
    """`undo` and the search for a failing request call `send_back`, and no memory was missing."""
    scheduler = make_scheduler(8)
    ratio = scheduler.admission.new_token_ratio
    run(scheduler, "A", 8, output=9, max_tokens=10)
    scheduler.send_back(run(scheduler, "B", 8))
    assert names(scheduler.waiting) == "B", f"B was sent back; {show(scheduler)}"
    got = scheduler.counters.num_retractions, scheduler.admission.new_token_ratio
    assert got == (0, ratio), "`send_back` counts no retraction, and leaves the ratio as it was"


def test_a_retracted_request_waits_before_all_others() -> None:
    scheduler = make_scheduler(4)
    a, _ = run(scheduler, "A", 8), run(scheduler, "B", 8)
    wait(scheduler, "X", 3)
    wait(scheduler, "Y", 3)
    scheduler.retract_for(a)
    assert names(scheduler.waiting) == "B X Y", "I5: B came before X and Y, and waits before them"


@pytest.mark.parametrize(
    ("before", "output", "max_tokens", "least"),
    [
        (0.1, 30, 40, 0.75), (0.3, 30, 40, 0.75), (0.9, 30, 40, 0.9), (1.0, 30, 40, 1.0),
        (0.7, 2, 150, 0.7),
    ],
)  # fmt: skip
def test_a_retraction_makes_admission_less_hopeful(
    before: float, output: int, max_tokens: int, least: float
) -> None:
    """Memory ran out at this ratio: it must not fall, nor be less than the share generated."""
    scheduler = make_scheduler(2 * -(-(6 + output) // 4))
    scheduler.admission.new_token_ratio = before
    a, _ = (run(scheduler, name, 7, output=output, max_tokens=max_tokens) for name in "AB")
    scheduler.retract_for(a)
    after = scheduler.admission.new_token_ratio
    assert least <= after <= 1.0, f"it was {before}; {output} of {max_tokens} tokens have come"


def test_the_retracted_request_counts_too() -> None:
    """A runs alone: the new ratio can only come from the tokens of A itself."""
    scheduler = make_scheduler(20)
    scheduler.admission.new_token_ratio = 0.1
    a = run(scheduler, "A", 7, output=30, computed=36, max_tokens=100)
    scheduler.retract(a)
    assert scheduler.admission.new_token_ratio == pytest.approx(0.5), (
        "A has 30 of 100 tokens and 20 more are expected: 0.5. The retracted request counts"
    )
