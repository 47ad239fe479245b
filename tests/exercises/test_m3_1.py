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


def owned_and_free(manager: KVCacheManager) -> list[int]:
    owned = [page for row in manager.table.rows for page in row]
    return sorted([*owned, *manager.allocator.free_pages])


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
    for tokens in range(1, 14):
        manager.allocate_slots(a, tokens)
        manager.allocate_slots(b, tokens)
        pages = list(manager.pages_of(a))
        assert pages[: len(before)] == before, (
            f"I1: A held the pages {before}; with {tokens} tokens its pages are {pages}"
        )
        needed = -(-tokens // 4)
        assert len(pages) == needed, (
            f"I3: the first {tokens} tokens of A take {needed} of the pages of 4; after "
            f"allocate_slots(A, {tokens}), A holds {pages}"
        )
        before = pages


def test_holding_what_is_held_changes_nothing() -> None:
    manager, (a,) = manager_with("A")
    manager.allocate_slots(a, 5)
    pages, free = list(manager.pages_of(a)), manager.num_free_pages
    for tokens in (5, 6, 8):
        manager.allocate_slots(a, tokens)
        assert (manager.pages_of(a), manager.num_free_pages) == (pages, free), (
            f"{tokens} tokens fit into A's 2 pages {pages}; now it holds {manager.pages_of(a)}"
        )


@pytest.mark.parametrize(("tokens", "left"), [(8, 2), (7, 2), (4, 1), (1, 1), (0, 0)])
def test_a_request_that_needs_less_gives_its_last_pages_back(tokens: int, left: int) -> None:
    """This happens after a failed step: the computed tokens stay in the first pages."""
    manager, (a,) = manager_with("A")
    manager.allocate_slots(a, 13)
    pages = list(manager.pages_of(a))
    manager.free_slots(a, tokens)
    assert manager.pages_of(a) == pages[:left], (
        f"I3: A held {pages}; for {tokens} tokens it must keep {pages[:left]}, not "
        f"{manager.pages_of(a)}"
    )
    assert owned_and_free(manager) == list(range(1, 21)), (
        f"I3: each of the 20 pages is owned or free, once: {owned_and_free(manager)}"
    )


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
        assert seen == pages, (
            f"I1: {request.request_id} holds {pages} for {tokens} tokens; the updates give {seen}"
        )


def test_room_counts_the_rest_of_the_last_page_and_the_free_pages() -> None:
    manager, (a,) = manager_with("A", pages=5)
    for computed, expected in ((0, 20), (1, 19), (3, 17), (4, 16), (5, 15), (20, 0)):
        manager.allocate_slots(a, computed)
        a.num_computed_tokens = computed
        got = manager.room(a)
        assert got == expected, (
            f"the pool has 5 pages of 4; A has computed {computed} tokens and holds "
            f"{len(manager.pages_of(a))} pages: room for {expected} more tokens, not {got}"
        )


def test_room_does_not_count_pages_of_others() -> None:
    manager, (a, b) = manager_with("A", "B", pages=5)
    manager.allocate_slots(a, 5)
    manager.allocate_slots(b, 12)
    a.num_computed_tokens, b.num_computed_tokens = 5, 12
    got = (manager.room(a), manager.room(b))
    assert got == (3, 0), f"no page is free; A has 3 unused slots in its last page, B none: {got}"


def test_free_gives_back_pages_and_row() -> None:
    manager, (a, b) = manager_with("A", "B")
    manager.allocate_slots(a, 9)
    manager.allocate_slots(b, 2)
    manager.free(a)
    assert a.row is None, f"I3: a freed request has no row, but A's row is {a.row}"
    assert manager.num_free_pages == 19, (
        f"I3: B holds 1 of 20 pages, but {manager.num_free_pages} are free"
    )
    assert owned_and_free(manager) == list(range(1, 21)), (
        f"I3: each of the 20 pages is owned or free, once: {owned_and_free(manager)}"
    )
    b.num_computed_tokens = 2
    manager.check_invariants([b])


def test_a_row_that_is_given_out_again_begins_empty() -> None:
    manager, (a, *_) = manager_with("A", "B", "C", "D")
    manager.allocate_slots(a, 9)
    manager.free(a)
    newcomer = make_request("N", 5)
    manager.allocate(newcomer)
    assert manager.pages_of(newcomer) == [], (
        f"N is new, but holds the pages {manager.pages_of(newcomer)}"
    )
    manager.allocate_slots(newcomer, 1)
    assert len(manager.pages_of(newcomer)) == 1, (
        f"I3: one token takes one page, not {manager.pages_of(newcomer)}"
    )


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
