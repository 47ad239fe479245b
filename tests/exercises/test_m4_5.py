"""m4.5: the tree takes over what a request has computed, and copies become free."""

from __future__ import annotations

import pytest

from m4_radix.kv_cache import PageTable
from tests.exercises.by_hand import make_request
from tests.exercises.radix_states import audit_pages, cache_by_hand, give_row, manager, picture


def test_a_row_begins_with_other_pages() -> None:
    table = PageTable(2)
    table.append(1, [5, 6, 7])
    table.take_updates()
    replaced = table.replace(1, [5, 9])
    assert table.rows == [[], [5, 9, 7]], "the first two pages are replaced, the third stays"
    assert replaced == [6], "page 6 has left the row, and 5 is still in it"
    assert table.take_updates() == [(1, 1, 9)], (
        "I1: `updates` must have the column that changed, or the forward reads the old page; and "
        "no other column: the device has it already"
    )
    assert table.replace(1, [5, 9]) == [], "no page was replaced: none may be freed"
    assert table.take_updates() == [], "nothing has changed"


@pytest.mark.parametrize(("num_tokens", "computed", "whole"), [(10, 10, 8), (16, 6, 4)])
def test_whole_pages_enter_the_tree(num_tokens: int, computed: int, whole: int) -> None:
    """Between two chunks of a prompt, the pages of the later chunks are not written yet."""
    kv_cache, request = manager(), make_request("a", num_tokens)
    pages = give_row(kv_cache, request, computed)
    kv_cache.insert(request)
    tokens = " ".join(map(str, range(1, whole + 1)))
    entered = " ".join(map(str, pages[: whole // 4]))
    assert picture(kv_cache.radix_cache) == {tokens: f"pages {entered}, locks 1"}, (
        f"I1: {computed} of {num_tokens} tokens are computed; the request reads and locks the pages"
    )
    assert kv_cache.num_inserted_tokens(request) == whole
    assert kv_cache.pages_of(request) == pages, "its row reads the same pages as before"
    audit_pages(kv_cache, [request], f"after insert of {computed} computed tokens")


def test_the_next_chunk_moves_the_lock_on() -> None:
    kv_cache, request = manager(), make_request("a", 16)
    pages = give_row(kv_cache, request, 4)
    kv_cache.insert(request)
    pages += kv_cache.allocator.allocate(1)
    kv_cache.table.append(request.row or 0, pages[1:])
    request.num_computed_tokens = 8
    kv_cache.insert(request)
    assert {node.lock_count for node in kv_cache.radix_cache.nodes()} == {1}, (
        "I3: insert locks the longer prefix and unlocks the shorter: one request, one lock each"
    )
    assert kv_cache.num_inserted_tokens(request) == 8
    audit_pages(kv_cache, [request], "after insert of a second chunk")


def test_inserting_twice_changes_nothing() -> None:
    kv_cache, request = manager(), make_request("a", [1, 2, 3, 4, 5])
    give_row(kv_cache, request, 5)
    kv_cache.insert(request)
    before = picture(kv_cache.radix_cache), list(kv_cache.allocator.free_pages)
    kv_cache.insert(request)
    assert (picture(kv_cache.radix_cache), kv_cache.allocator.free_pages) == before
    audit_pages(kv_cache, [request], "after the same insert twice")


def test_a_copy_is_given_up_for_the_trees_pages() -> None:
    """Two requests have computed the same tokens side by side. One copy is enough."""
    kv_cache = manager()
    first, second = (make_request(name, 9) for name in "ab")
    pages, copies = give_row(kv_cache, first, 9), give_row(kv_cache, second, 9)
    kv_cache.insert(first)
    kv_cache.insert(second)
    assert kv_cache.pages_of(second) == [*pages[:2], copies[2]], (
        "the second request adopts the tree's pages, and keeps its own half page"
    )
    assert set(copies[:2]) <= set(kv_cache.allocator.free_pages), "I3: its copies are free"
    told = {(column, page) for row, column, page in kv_cache.table.updates if row == second.row}
    assert told == set(enumerate(pages[:2])), "updates must have the new pages"
    audit_pages(kv_cache, [first, second], "after two requests inserted the same tokens")


def test_a_copy_is_given_up_in_the_middle_of_a_row() -> None:
    """Two requests share the first page, and each has computed the second one for itself."""
    kv_cache = manager(10)
    stem = cache_by_hand(kv_cache, [1, 2, 3, 4])
    first, second = (make_request(name, 9) for name in "ab")
    pages, copies = (give_row(kv_cache, request, 9, stem) for request in (first, second))
    kv_cache.insert(first)
    kv_cache.insert(second)
    assert kv_cache.pages_of(second) == [stem.pages[0], pages[1], copies[2]]
    assert copies[1] in kv_cache.allocator.free_pages
    assert stem.pages[0] not in kv_cache.allocator.free_pages, "I3: the tree owns this page"
    audit_pages(
        kv_cache, [first, second], "after both requests inserted a copy after a shared stem"
    )


def test_what_a_request_computed_outlives_it() -> None:
    """The next turn of a chat begins with the prompt and the answer of this one."""
    kv_cache, request = manager(), make_request("a", [1, 2, 3])
    request.token_ids += [10, 11, 12, 13, 14, 15]
    pages = give_row(kv_cache, request, 8)  # the last token was sampled, and never computed
    row = request.row or 0
    kv_cache.free(request)
    assert picture(kv_cache.radix_cache) == {
        "1 2 3 10 11 12 13 14": f"pages {pages[0]} {pages[1]}"
    }, "prompt and answer stay cached, except the last token; no request holds them"
    assert request.row is None and len(kv_cache.free_rows) == 3, "I3: the row is free again"
    assert kv_cache.table.rows[row] == [], (
        "I1: a free row has no pages: the next request in it would begin with those of another one"
    )
    assert kv_cache.num_free_pages == 8, "all pages can be had: the cached ones can be evicted"
    audit_pages(kv_cache, [], "after free of a request that ended")


def test_the_half_page_is_free() -> None:
    kv_cache, request = manager(), make_request("a", [1, 2, 3, 4, 5, 6])
    pages = give_row(kv_cache, request, 6)
    kv_cache.free(request)
    assert pages[1] in kv_cache.allocator.free_pages, "a part of a page is not cached"
    assert pages[0] not in kv_cache.allocator.free_pages, "I3: the tree owns it"
    audit_pages(kv_cache, [], "after free of a page and a half")


@pytest.mark.parametrize("computed", [4, 0])
def test_pages_for_tokens_that_were_never_computed_are_free(computed: int) -> None:
    """A request is freed while a step is planned: its row has pages that are not written."""
    kv_cache, request = manager(), make_request("a", 16)
    pages = give_row(kv_cache, request, 16)
    request.num_computed_tokens = computed
    kv_cache.free(request)
    left = {"1 2 3 4": f"pages {pages[0]}"} if computed else {}
    assert picture(kv_cache.radix_cache) == left, (
        "I1: the other tokens were never computed: no request may find them"
    )
    assert len(kv_cache.allocator.free_pages) == 8 - len(left), "I3: all other pages are free"
    audit_pages(kv_cache, [], "after free of a request with pages it had not written")


def test_a_request_leaves_a_shared_prefix_to_the_other_one() -> None:
    kv_cache = manager()
    stem = cache_by_hand(kv_cache, [1, 2, 3, 4])
    leaving, staying = (make_request(name, [1, 2, 3, 4, ord(name)]) for name in "ab")
    give_row(kv_cache, leaving, 5, stem)
    give_row(kv_cache, staying, 5, stem)
    kv_cache.free(leaving)
    assert stem.lock_count == 1, "one of the two requests that read it has ended"
    assert kv_cache.radix_cache.evictable_size == 0, "I3: the other request still reads it"
    audit_pages(kv_cache, [staying], "after one of two readers left")
    kv_cache.free(staying)
    audit_pages(kv_cache, [], "after both left")
    assert kv_cache.radix_cache.evictable_size == 1


def test_two_that_end_alike_leave_one_copy() -> None:
    """The pages of the second are copies of cached pages: each of them is freed once."""
    kv_cache = manager()
    for name in "ab":
        request = make_request(name, [1, 2, 3, 4, 5, 6, 7, 8])
        give_row(kv_cache, request, 8)
        kv_cache.free(request)
        audit_pages(kv_cache, [], f"after {name} ended")
    assert len(kv_cache.allocator.free_pages) == 6, "two pages are cached, the other six are free"
