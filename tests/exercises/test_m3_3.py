"""m3.3: admission by expectation. `Admission.check` and what it asks; plain data."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from m3_paged.add_req_result import AddReqResult
from m3_paged.admission import CLIP_MAX_NEW_TOKENS
from m3_paged.schedule_batch import ScheduleBatch
from m3_paged.scheduler import Scheduler
from tests.exercises.by_hand import make_request
from tests.exercises.paged_states import make_scheduler, run, show, wait


def fits(scheduler: Scheduler) -> bool:
    """Ask whether the memory is expected to last, if X, the first that waits, joins."""
    return scheduler.admission.fits(scheduler.waiting[0], scheduler.running)


def result_of(scheduler: Scheduler, scheduled: int = 0) -> AddReqResult:
    """Ask whether X joins a step in which `scheduled` tokens are scheduled already."""
    batch = (
        ScheduleBatch([make_request("before", 16)], [scheduled]) if scheduled else ScheduleBatch()
    )
    return scheduler.admission.check(scheduler.waiting[0], batch, scheduler.running)


def test_rows_and_tokens_do_not_ask_for_memory() -> None:
    """`budget_state` is about this step. Only `fits` compares the memory."""
    scheduler = make_scheduler(3)
    scheduler.admission.new_token_ratio = 1.0
    run(scheduler, "A", 8, max_tokens=30)
    wait(scheduler, "X", 12)
    state = scheduler.admission.budget_state(ScheduleBatch())
    assert state is AddReqResult.CONTINUE, f"a row is free; {show(scheduler)}"
    assert not fits(scheduler), f"no page is; {show(scheduler)}"
    assert result_of(scheduler) is AddReqResult.NO_MEMORY


def test_all_rows_are_taken() -> None:
    scheduler = make_scheduler(100, max_num_seqs=2)
    wait(scheduler, "X", 3)
    run(scheduler, "A", 5)
    joins = result_of(scheduler) is AddReqResult.CONTINUE
    assert joins, f"one of two rows is free; {show(scheduler)}"
    run(scheduler, "B", 5)
    assert result_of(scheduler) is AddReqResult.NO_ROW, f"both rows are taken; {show(scheduler)}"


@pytest.mark.parametrize(
    ("scheduled", "expected"), [(0, "CONTINUE"), (15, "CONTINUE"), (16, "NO_BUDGET")]
)
def test_the_step_has_a_token_left(scheduled: int, expected: str) -> None:
    """One token is enough, because a chunk may be one token long."""
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    run(scheduler, "A", 5)
    wait(scheduler, "X", 30)
    result = result_of(scheduler, scheduled)
    assert result.name == expected, f"{scheduled} of 16 tokens are scheduled"


# With a ratio of 0.5, A is expected to need 4 pages (8 + 6 tokens), of which it holds 2, and X is
# expected to need 4 pages (12 + 4 tokens).
A = {"prompt": 7, "output": 1, "computed": 7, "max_tokens": 13}
X = {"prompt": 12, "max_tokens": 8}
SHORT = {"prompt": 4, "output": 1}
# Why: the pages of the pool, the ratio, the requests that run, X, and whether X can be admitted.
MEMORY: dict[str, tuple[int, float, list[dict[str, int]], dict[str, int], bool]] = {
    "A is expected to need 2 more pages and X 4, and 5 are free": (7, 0.5, [A], X, False),
    "A is expected to need 2 more pages and X 4, and 6 are free": (8, 0.5, [A], X, True),
    "A is expected to need 2 more pages and X 4, and 7 are free": (9, 0.5, [A], X, True),
    "no more tokens are expected: X needs 3 pages, and 6 are free": (8, 0.0, [A], X, True),
    "all tokens are expected: A needs 3 more pages and X 5": (8, 1.0, [A], X, False),
    "10 pages are free; half a prompt of 40 tokens needs 8 of them, and X needs 3": (
        12, 0.0, [{"prompt": 40, "output": 0, "computed": 8}], {"prompt": 12}, False,
    ),
    "three requests need a page each for one token, and 2 are free": (
        4, 0.0, [SHORT, SHORT], {"prompt": 1}, False,
    ),
    "three requests need a page each for one token, and 3 are free": (
        5, 0.0, [SHORT, SHORT], {"prompt": 1}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", MEMORY)
def test_memory_is_there_for_what_is_expected(why: str) -> None:
    pages, ratio, running, waiting, expected = MEMORY[why]
    scheduler = make_scheduler(pages)
    scheduler.admission.new_token_ratio = ratio
    for name, request in zip("AB", running, strict=False):
        run(scheduler, name, **request)
    wait(scheduler, "X", **waiting)
    joins = result_of(scheduler) is AddReqResult.CONTINUE
    assert joins == expected, f"{why}; {show(scheduler)}"


def test_alone_a_request_has_the_pool_to_itself() -> None:
    """No other request holds memory that could become free: X would wait for ever."""
    scheduler = make_scheduler(5)
    scheduler.admission.new_token_ratio = 1.0
    wait(scheduler, "X", 18, max_tokens=30)
    joins = result_of(scheduler) is AddReqResult.CONTINUE
    assert joins, "I5: no request runs, so X joins, although it may outgrow 5 pages"


@pytest.mark.parametrize(
    ("prompt", "output", "pages"),
    [(1, 0, 2), (3, 0, 2), (4, 0, 2), (5, 0, 3), (8, 0, 3), (9, 0, 4), (4, 12, 5)],
)
def test_expected_pages_at_page_edges(prompt: int, output: int, pages: int) -> None:
    """8 more tokens may come, and half of them are expected. Those that came are counted once."""
    scheduler = make_scheduler(50)
    scheduler.admission.new_token_ratio = 0.5
    request = make_request("X", prompt, output=output, max_tokens=output + 8)
    assert scheduler.admission.expected_pages(request) == pages, (
        f"{prompt + output} tokens and 4 expected ones, in pages of 4"
    )


@pytest.mark.parametrize(("ratio", "pages"), [(0.5, 2), (0.9, 2), (0.99, 2), (1.0, 3)])
def test_expected_tokens_are_rounded_down(ratio: float, pages: int) -> None:
    """8 tokens, and one more may come: a fraction of it is no token, so no third page either."""
    scheduler = make_scheduler(50)
    scheduler.admission.new_token_ratio = ratio
    request = make_request("X", 8, max_tokens=1)
    assert scheduler.admission.expected_pages(request) == pages, (
        f"8 tokens and {ratio} of one more, rounded down, in pages of 4"
    )


def test_a_generous_limit_is_clipped() -> None:
    """A request that may generate a million tokens must not keep all others waiting."""
    scheduler = make_scheduler(50)
    scheduler.admission.new_token_ratio = 0.5
    request = make_request("X", 4)
    request.max_num_tokens = 1_000_000
    pages = (4 + CLIP_MAX_NEW_TOKENS // 2) // 4
    assert scheduler.admission.expected_pages(request) == pages, (
        f"half of {CLIP_MAX_NEW_TOKENS} tokens are expected, not half of a million"
    )


def test_asking_changes_nothing() -> None:
    scheduler = make_scheduler(8)
    run(scheduler, "A", 7)
    wait(scheduler, "X", 12)

    def state() -> Any:
        rows, ratio = scheduler.kv_cache.table.rows, scheduler.admission.new_token_ratio
        return copy.deepcopy(rows), show(scheduler), ratio

    before = state()
    result_of(scheduler)
    assert state() == before, "I3: asking must change nothing"
