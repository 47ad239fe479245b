"""m4.4: a row begins with the cached prefix, and evicts from the tree if no page is free."""

from __future__ import annotations

import pytest

from common import SamplingParams
from tests.exercises.by_hand import make_request, request_with
from tests.exercises.radix_states import audit_pages, cache_by_hand, give_row, manager, picture


def test_the_prefix_is_locked_the_moment_it_is_found() -> None:
    kv_cache = manager()
    cached = cache_by_hand(kv_cache, [1, 2, 3, 4])
    first, second = (make_request(name, [1, 2, 3, 4, 9]) for name in "ab")
    kv_cache.allocate(first)
    kv_cache.allocate(second)
    assert picture(kv_cache.radix_cache) == {"1 2 3 4": f"pages {cached.pages[0]}, locks 2"}, (
        "I3: two requests read the cached page, so it has two locks"
    )
    assert kv_cache.radix_cache.evictable_size == 0, (
        "I3: two rows read this page; without a lock, the next request that needs memory gets it"
    )
    audit_pages(kv_cache, [first, second], "after two requests found one prefix")


def test_a_cold_request_begins_with_an_empty_row() -> None:
    kv_cache, request = manager(), make_request("a", [1, 2, 3, 4, 5])
    kv_cache.allocate(request)
    assert request.row is not None and kv_cache.pages_of(request) == []
    assert request.num_computed_tokens == 0, "nothing is cached: it computes from the start"
    audit_pages(kv_cache, [request], "after allocate of a cold request")


def test_a_row_begins_with_the_pages_that_are_cached() -> None:
    kv_cache = manager()
    cached = cache_by_hand(kv_cache, range(1, 9))
    request = make_request("a", [*range(1, 9), 9, 9])
    kv_cache.allocate(request)
    assert kv_cache.pages_of(request) == cached.pages, "the row names the tree's pages"
    assert request.num_computed_tokens == 8, "the request starts to compute after the cached tokens"
    told = {(column, page) for row, column, page in kv_cache.table.updates if row == request.row}
    assert told == set(enumerate(cached.pages)), (
        "I1: the forward reads the table on the device, which is changed through `updates` only"
    )
    audit_pages(kv_cache, [request], "after allocate with eight tokens cached")
    kv_cache.table.rows[request.row or 0].append(99)
    assert len(cached.pages) == 2, "I3: the row grew, and a node of the tree grew too"


def test_a_row_begins_with_the_pages_of_the_whole_path() -> None:
    """The cached prefix lies in two nodes: the row needs the pages of both."""
    kv_cache = manager()
    stem = cache_by_hand(kv_cache, [1, 2, 3, 4])
    leaf = cache_by_hand(kv_cache, [5, 6, 7, 8], stem)
    request = make_request("a", [*range(1, 9), 9])
    kv_cache.allocate(request)
    assert kv_cache.pages_of(request) == [*stem.pages, *leaf.pages], (
        "I1: the prefix is 1 2 3 4 and 5 6 7 8 below it: the row begins with the pages of both"
    )
    assert request.num_computed_tokens == 8, "8 tokens are cached, 4 in each of the two nodes"
    audit_pages(kv_cache, [request], "after allocate with a prefix in two nodes")


def test_a_prompt_with_log_probabilities_is_computed() -> None:
    """The tree has no log probabilities: a request that needs them computes its whole prompt."""
    kv_cache = manager()
    cache_by_hand(kv_cache, range(1, 9))
    request = request_with(SamplingParams(prompt_logprobs=1), [*range(1, 9), 9])
    found = kv_cache.find_prefix(request).num_pages
    assert found == 0, (
        f"two pages are cached, but the request needs_prompt_logprobs: it can use 0, not {found}"
    )


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_the_last_token_is_always_computed(page_size: int) -> None:
    """If the whole prompt is cached, its last token must be computed, or no token is sampled."""
    for length in (1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1, 8):
        prompt = list(range(50, 50 + length))
        kv_cache, request = manager(16, page_size), make_request("a", prompt)
        reusable = (length - 1) // page_size * page_size
        assert kv_cache.find_prefix(request).num_pages == 0, "nothing is cached yet"
        cache_by_hand(kv_cache, prompt + [7] * (-length % page_size))
        found = kv_cache.find_prefix(request).num_pages * page_size
        assert found == reusable, (
            f"I1: a prompt of {length} tokens is cached in pages of {page_size}: all but the last "
            "token may be reused, because computing that one yields the next one"
        )
        kv_cache.allocate(request)
        assert request.num_computed_tokens == reusable, (
            f"{reusable} of {length} tokens are reused: the request starts to compute after them"
        )
        audit_pages(kv_cache, [request], f"after allocate of {length} cached tokens")


def test_what_was_generated_before_a_retraction_is_found_again() -> None:
    """A retracted request starts again with its prompt and its output: both may be cached."""
    kv_cache = manager()
    request = make_request("a", [1, 2, 3])
    request.token_ids += [10, 11, 12, 13, 14, 15]
    assert kv_cache.find_prefix(request).num_pages == 0
    cache_by_hand(kv_cache, [1, 2, 3, 10, 11, 12, 13, 14])
    kv_cache.allocate(request)
    assert request.num_computed_tokens == 8, (
        "of its nine tokens (three of the prompt, six of the output) eight are cached"
    )


def test_a_request_that_shares_a_part_locks_that_part() -> None:
    kv_cache = manager()
    cache_by_hand(kv_cache, [1, 2, 3, 4, 5, 6, 7, 8])
    request = make_request("a", [1, 2, 3, 4, 9, 9, 9, 9, 9])
    kv_cache.allocate(request)
    assert kv_cache.radix_cache.evictable_size == 1, "no request reads the second page"
    assert request.num_computed_tokens == 4, "the prompt agrees with the first page only"
    audit_pages(
        kv_cache, [request], "after allocate of a prompt that shares one of two cached pages"
    )


def test_pages_held_are_those_the_tokens_need() -> None:
    kv_cache, request = manager(), make_request("a", [1] * 30)
    give_row(kv_cache, request, 0)
    for num_tokens, pages in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (32, 8)):
        kv_cache.allocate_slots(request, num_tokens)
        held = kv_cache.pages_of(request)
        assert len(held) == pages, f"{num_tokens} tokens need {pages} pages of 4"
        request.num_computed_tokens = num_tokens
        audit_pages(kv_cache, [request], f"after allocate_slots(request, {num_tokens})")


def test_pages_that_a_row_has_already_stay_in_it() -> None:
    """A row may have more pages than a step needs. `allocate_slots` only adds pages."""
    kv_cache, request = manager(), make_request("a", [1] * 20)
    pages = give_row(kv_cache, request, 12)
    for num_tokens in (5, 12):
        kv_cache.allocate_slots(request, num_tokens)
        assert kv_cache.pages_of(request) == pages, f"it has pages for {num_tokens} tokens already"
    audit_pages(kv_cache, [request], "after allocate_slots for tokens that have their pages")


@pytest.mark.parametrize(("cached", "needed", "left"), [(3, 2, 3), (4, 3, 2)])
def test_as_much_is_evicted_as_is_missing(cached: int, needed: int, left: int) -> None:
    """The pool has five pages. A free page comes before a cached one."""
    kv_cache, request = manager(num_pages=5), make_request("a", [1] * 20)
    give_row(kv_cache, request, 0)
    cache_by_hand(kv_cache, [9] * 4 * cached)
    kv_cache.allocate_slots(request, 4 * needed)
    assert len(kv_cache.pages_of(request)) == needed
    assert kv_cache.radix_cache.evictable_size == left, (
        f"{needed} pages are needed, {5 - cached} are free, {cached} are cached"
    )
    request.num_computed_tokens = 4 * needed
    audit_pages(kv_cache, [request], f"after allocate_slots of {needed} pages")


def test_a_step_takes_no_page_that_a_neighbour_reads() -> None:
    kv_cache = manager(num_pages=4)
    request = make_request("a", [1] * 20)
    give_row(kv_cache, request, 0)
    read = cache_by_hand(kv_cache, [5, 5, 5, 5], used=1)
    unread = cache_by_hand(kv_cache, [6, 6, 6, 6], used=2).pages[0]
    neighbour = make_request("b", [5, 5, 5, 5, 5])
    give_row(kv_cache, neighbour, 4, read)
    kv_cache.allocate_slots(request, 12)
    assert unread in kv_cache.pages_of(request), "no request reads this page: it must be evicted"
    assert not set(read.pages) & set(kv_cache.pages_of(request)), "I3: a page has two owners"
    request.num_computed_tokens = 12
    audit_pages(
        kv_cache, [request, neighbour], "after allocate_slots beside a reader of the oldest page"
    )
