"""priority.1: evicted prefixes have copies on the host, and requests find them."""

from __future__ import annotations

from collections.abc import Sequence

from milestones.electives.priority.hi_radix_cache import HiRadixCache, Transfer, page_keys

PAGE_SIZE = 2
A, B, C = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14], [21, 22]


def make_cache(num_host_pages: int) -> HiRadixCache:
    """Return an empty tree with pages of two tokens. Copying is faster than computing."""
    cache = HiRadixCache(PAGE_SIZE, num_host_pages)
    cache.costs.token_seconds = 1.0
    return cache


def cached(cache: HiRadixCache, tokens: Sequence[int], first_page: int) -> list[int]:
    """Add a prefix in pages that begin with `first_page`. Return the pages."""
    pages = list(range(first_page, first_page + len(tokens) // PAGE_SIZE))
    cache.insert(tokens, pages)
    return pages


def copied(cache: HiRadixCache, tokens: Sequence[int]) -> list[bool]:
    """Return for each page of a prefix whether it has a copy. Check I3 of the host pool."""
    cache.check_host()
    return [key in cache.copies for key in page_keys(tokens, PAGE_SIZE)]


def test_an_evicted_page_leaves_a_copy_of_its_whole_prefix() -> None:
    cache = make_cache(8)
    pages = cached(cache, A, first_page=40)
    assert cache.evict(1) == [42], "the last page leaves the pool"
    started = cache.take_transfers()
    found = [(t.page, t.to_host) for t in started]
    assert found == [(page, True) for page in pages], f"three pages are copied: {started}"
    assert len({t.host_page for t in started}) == 3, f"each to a page of its own: {started}"
    assert copied(cache, A) == [True] * 3, "each page has a copy under its own key"


def test_a_prefix_in_two_nodes_is_copied_as_a_whole() -> None:
    """The leaf has one page. Its prefix begins with two pages of the node above it."""
    cache = make_cache(8)
    cached(cache, A[:4], first_page=40)
    cached(cache, A, first_page=40)
    cache.evict(1)
    found = [(t.page, t.to_host) for t in cache.take_transfers()]
    assert found == [(40, True), (41, True), (42, True)], (
        "page 42 was evicted: without copies of 40 and 41 before it, its copy would never be found"
    )


def test_a_page_is_copied_once() -> None:
    cache = make_cache(8)
    cached(cache, A, first_page=40)
    cache.evict(1)
    cache.take_transfers()
    cache.evict(2)
    assert cache.take_transfers() == [], "the other pages of the prefix have copies"
    assert copied(cache, A) == [True] * 3, "the copies stay"


def test_pages_that_are_computed_faster_are_dropped() -> None:
    """Two copies of a page take 2 s, computing its two tokens 1 s."""
    cache = make_cache(8)
    cache.costs.page_seconds, cache.costs.token_seconds = 1.0, 0.5
    cached(cache, A, first_page=40)
    cache.evict(3)
    assert cache.take_transfers() == [], "recomputation is predicted to be faster"
    assert copied(cache, A) == [False] * 3, "a page without a copy has no key"


def test_a_full_host_drops_the_copies_that_were_used_longest_ago() -> None:
    """Of one prefix, the last page is dropped first: without the first one, no page is found."""
    cache = make_cache(4)
    cached(cache, A, first_page=40)
    cache.evict(3)
    cached(cache, B, first_page=50)
    cache.evict(2)
    found = (copied(cache, A), copied(cache, B))
    assert found == ([True, True, False], [True, True]), "one copy of A must go"


def test_a_prefix_that_is_larger_than_the_host_keeps_its_beginning() -> None:
    cache = make_cache(2)
    cached(cache, A, first_page=40)
    cache.evict(3)
    assert copied(cache, A) == [True, True, False], "no page of its own prefix is dropped for it"
    assert len(cache.take_transfers()) == 2, "two pages are copied"


def test_a_host_without_pages_copies_nothing() -> None:
    cache = make_cache(0)
    cached(cache, A, first_page=40)
    assert (cache.evict(3), cache.take_transfers()) == ([40, 41, 42], []), "as in m5"


def evicted(num_host_pages: int = 8) -> HiRadixCache:
    """Return a cache in which A has copies and no pages."""
    cache = make_cache(num_host_pages)
    cached(cache, A, first_page=40)
    cache.evict(3)
    cache.take_transfers()
    return cache


def test_copies_are_found_behind_the_pages_of_the_tree() -> None:
    cache, keys = evicted(), page_keys(A, PAGE_SIZE)
    assert list(cache.take_copies(A, start=1, most=9)) == keys[1:], "the pages after the first one"
    cache, keys = evicted(), page_keys(A, PAGE_SIZE)
    assert list(cache.take_copies(A, start=1, most=1)) == keys[1:2], "one page after the first one"


def test_no_more_copies_than_pages_are_taken() -> None:
    cache, keys = evicted(), page_keys(A, PAGE_SIZE)
    assert list(cache.take_copies(A, start=0, most=2)) == keys[:2], "only two pages are free"
    assert list(cache.copies) == keys[2:], "the third copy stays where it is"


def test_a_missing_copy_ends_the_prefix() -> None:
    cache, keys = evicted(), page_keys(A, PAGE_SIZE)
    cache.free_host_pages.append(cache.copies.pop(keys[1]))
    assert list(cache.take_copies(A, start=0, most=9)) == keys[:1], "the second page is missing"


def test_other_tokens_find_no_copy() -> None:
    """I1: a page depends on all tokens before it."""
    assert evicted().take_copies([9, 9, *A[2:]], start=0, most=9) == {}, "other first tokens"


def test_pages_that_are_computed_faster_are_not_loaded() -> None:
    """A copy of a page takes 1 s, computing its two tokens 0.5 s."""
    cache = evicted()
    cache.costs.page_seconds, cache.costs.token_seconds = 1.0, 0.25
    assert cache.take_copies(A, start=0, most=9) == {}, "recomputation is predicted to be faster"
    assert copied(cache, A) == [True] * 3, "the copies stay"


def test_one_copy_must_be_faster_and_not_two() -> None:
    """A copy of a page takes 1 s, computing its two tokens 1.5 s. It is on the host already."""
    cache, keys = evicted(), page_keys(A, PAGE_SIZE)
    cache.costs.page_seconds, cache.costs.token_seconds = 1.0, 0.75
    assert list(cache.take_copies(A, start=0, most=9)) == keys, (
        "one copy, from the host to the device, is faster than computing"
    )


def test_copies_that_are_being_loaded_are_not_dropped() -> None:
    """I1: while pages are found for them, other prefixes need the host pages."""
    cache = evicted(num_host_pages=3)
    sources = cache.take_copies(A, start=0, most=9)
    cached(cache, B, first_page=50)
    cache.evict(2)
    assert cache.take_transfers() == [], "all host pages hold pages that are being loaded"
    cache.load(sources, [60, 61, 62])
    loads = [Transfer(60 + i, page, False) for i, page in enumerate(sources.values())]
    assert cache.take_transfers() == loads, "each page comes from its own host page"
    assert copied(cache, A) == [True] * 3, "the copies stay: evicting the pages again is free"


def test_loaded_copies_are_the_last_to_be_dropped() -> None:
    cache = evicted(num_host_pages=4)
    cached(cache, C, first_page=50)
    cache.evict(1)
    cache.load(cache.take_copies(A, start=0, most=9), [60, 61, 62])
    cached(cache, B, first_page=70)
    cache.evict(1)
    found = (copied(cache, A), copied(cache, C))
    assert found == ([True, True, False], [False]), "C was used longest ago"
