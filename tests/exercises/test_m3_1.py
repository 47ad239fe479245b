"""m3.1: pages as a request grows. `KVCacheManager.allocate_slots` and its counterparts."""

from __future__ import annotations

import random

import pytest

from common import Request
from m3_paged.kv_cache import KVCacheManager
from tests.exercises.by_hand import make_request


def manager_with(
    *names: str, pages: int = 20, size: int = 4
) -> tuple[KVCacheManager, list[Request]]:
    """Return a manager of 4 rows, and requests that have a row each and no pages yet."""
    manager = KVCacheManager(4, pages, size)
    requests = [make_request(name, 60) for name in names]
    for request in requests:
        manager.allocate(request)
    return manager, requests


def assert_each_page_once(manager: KVCacheManager) -> None:
    owned = [page for row in manager.table.rows for page in row]
    assert sorted([*owned, *manager.allocator.free_pages]) == list(range(1, 21)), (
        "I3: each of the 20 pages is owned or free, once"
    )


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_a_request_holds_the_pages_its_tokens_need(size: int) -> None:
    for tokens in sorted({1, size - 1, size, size + 1, 2 * size} - {0}):
        manager, (a,) = manager_with("A", size=size)
        manager.allocate_slots(a, tokens)
        expected = (tokens + size - 1) // size
        assert len(manager.pages_of(a)) == expected, (
            f"I3: {tokens} tokens in pages of {size} take {expected} pages, but A holds the pages "
            f"{manager.pages_of(a)}"
        )


def test_pages_that_are_held_stay_where_they_are() -> None:
    """The pages contain tokens: a request that grows only appends pages at the end of its row."""
    manager, (a, b) = manager_with("A", "B")
    before: list[int] = []
    for tokens in sorted([*range(1, 14)] * 2):  # each of them twice: it holds its pages already
        manager.allocate_slots(a, tokens)
        manager.allocate_slots(b, tokens)
        pages = list(manager.pages_of(a))
        assert pages[: len(before)] == before, f"I1: A held the pages {before}"
        assert len(pages) == -(-tokens // 4), f"I3: pages of 4 for the first {tokens} tokens of A"
        assert_each_page_once(manager)
        before = pages


@pytest.mark.parametrize(("tokens", "left"), [(8, 2), (7, 2), (4, 1), (1, 1), (0, 0)])
def test_a_request_that_needs_less_gives_its_last_pages_back(tokens: int, left: int) -> None:
    """This happens after a failed step: the computed tokens stay in the first pages."""
    manager, (a,) = manager_with("A")
    manager.allocate_slots(a, 13)
    pages = list(manager.pages_of(a))
    manager.free_slots(a, tokens)
    assert manager.pages_of(a) == pages[:left], f"I3: A held {pages}, and needs {left} of them"
    assert_each_page_once(manager)


def test_the_runner_learns_of_every_new_page() -> None:
    """The runner copies `take_updates()` into its table: each new page must be among them."""
    manager, (a, b) = manager_with("A", "B")
    mirror: dict[tuple[int, int], int] = {}
    for request, tokens in ((a, 9), (b, 4), (a, 14), (b, 5), (a, 3), (a, 12)):
        manager.free_slots(request, tokens)
        manager.allocate_slots(request, tokens)
        mirror |= {(row, column): page for row, column, page in manager.table.take_updates()}
        pages = manager.pages_of(request)
        assert request.row is not None
        seen = [mirror.get((request.row, column)) for column in range(len(pages))]
        assert seen == pages, f"I1: the updates of {request.request_id}, which has {tokens} tokens"


def test_room_counts_the_rest_of_the_last_page_and_the_free_pages() -> None:
    manager, (a,) = manager_with("A", pages=5)
    for computed, expected in ((0, 20), (1, 19), (3, 17), (4, 16), (5, 15), (20, 0)):
        manager.allocate_slots(a, computed)
        a.num_computed_tokens = computed
        assert manager.available_slots(a) == expected, (
            f"the pool has 5 pages of 4; A has computed {computed} tokens and holds "
            f"{len(manager.pages_of(a))} pages: room for {expected} more tokens"
        )
    a.num_computed_tokens = 2  # a step allocates the pages of a chunk before it computes the chunk
    assert manager.available_slots(a) == 18, (
        "A holds 5 pages of 4, has computed 2 tokens, and no page is free: room for 18 more tokens"
    )


def test_room_does_not_count_pages_of_others() -> None:
    manager, (a, b) = manager_with("A", "B", pages=5)
    manager.allocate_slots(a, 5)
    manager.allocate_slots(b, 12)
    a.num_computed_tokens, b.num_computed_tokens = 5, 12
    got = (manager.available_slots(a), manager.available_slots(b))
    assert got == (3, 0), "no page is free; A has 3 unused slots in its last page, B none"


def test_free_gives_back_pages_and_row() -> None:
    manager, (a, b) = manager_with("A", "B")
    manager.allocate_slots(a, 9)
    manager.allocate_slots(b, 2)
    manager.free(a)
    assert a.row is None, "I3: a freed request has no row"
    assert manager.num_free_pages == 19, "I3: B holds 1 of 20 pages"
    assert_each_page_once(manager)
    b.num_computed_tokens = 2
    manager.check_invariants([b])


def test_a_row_that_is_given_out_again_begins_empty() -> None:
    manager, (a, *_) = manager_with("A", "B", "C", "D")
    manager.allocate_slots(a, 9)
    manager.free(a)
    newcomer = make_request("N", 5)
    manager.allocate(newcomer)
    assert manager.pages_of(newcomer) == [], "N is new, and holds no page"
    manager.allocate_slots(newcomer, 1)
    assert len(manager.pages_of(newcomer)) == 1, "I3: one token takes one page"


def test_no_page_is_lost_in_a_thousand_steps() -> None:
    chance = random.Random(3)
    manager, requests = manager_with("A", "B", "C", "D", pages=30, size=3)
    for _ in range(1000):
        request = chance.choice(requests)
        if request.row is not None and chance.random() < 0.1:
            manager.free(request)
            request.num_computed_tokens = 0
        elif request.row is None:
            manager.allocate(request)
        else:
            request.num_computed_tokens = chance.randint(0, 21)
            manager.free_slots(request, request.num_computed_tokens)
            manager.allocate_slots(request, request.num_computed_tokens)
        manager.check_invariants([r for r in requests if r.row is not None])
