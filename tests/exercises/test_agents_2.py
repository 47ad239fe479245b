"""agents.2: demoted conversations keep their copies, and what is over gets none."""

from __future__ import annotations

from milestones.electives.agents.hi_radix_cache import HiRadixCache, page_keys
from tests.exercises.test_agents_1 import LATER, PAGE_SIZE, A, B, C, D


def make_cache(num_host_pages: int) -> HiRadixCache:
    """Return an empty tree at time 0. Copying is faster than computing."""
    cache = HiRadixCache(PAGE_SIZE, num_host_pages)
    cache.costs.token_seconds = 1.0
    cache.now = lambda: 0.0
    return cache


def add(cache: HiRadixCache, tokens: list[int], returns_at: float | None = None) -> None:
    """Add a prefix: that of a paused conversation if it has a time of return."""
    first = 10 * tokens[-1]
    node = cache.insert(tokens, list(range(first, first + len(tokens) // PAGE_SIZE)))
    if returns_at is not None:
        name = f"talk {tokens[-1]}"
        cache.protect(name, node, returns_at, LATER)


def copied(cache: HiRadixCache, tokens: list[int]) -> list[bool]:
    """Return for each page of a prefix whether it has a copy. Check I3 of the host pool."""
    cache.check_host()
    return [key in cache.copies for key in page_keys(tokens, PAGE_SIZE)]


def test_a_demoted_conversation_has_copies_of_its_prefix() -> None:
    cache = make_cache(8)
    add(cache, A, returns_at=5.0)
    cache.evict(1)
    assert copied(cache, A) == [True, True], "its whole prefix, not only the evicted page"
    started = [(t.page, t.to_host) for t in cache.take_transfers()]
    assert started == [(10, True), (11, True)], "in order of position"
    assert cache.num_written == 2, "both are counted"


def test_a_released_prefix_gets_no_copy() -> None:
    cache = make_cache(8)
    cache.release(cache.insert(A, [10, 11]))
    cache.evict(2)
    assert copied(cache, A) == [False, False], "no call will need it"
    assert cache.take_transfers() == []


def test_copies_of_others_are_dropped_first() -> None:
    """The conversation was demoted before, so its copies were used longest ago."""
    cache = make_cache(4)
    add(cache, A, returns_at=5.0)
    cache.evict(2)
    add(cache, B)
    cache.evict(2)
    add(cache, C)
    cache.evict(2)
    found = [copied(cache, tokens) for tokens in (A, B, C)]
    assert found == [[True, True], [False, False], [True, True]]


def test_of_copies_that_nothing_needs_the_oldest_goes() -> None:
    cache = make_cache(4)
    for tokens in (A, B, C):
        add(cache, tokens)
        cache.evict(2)
    found = [copied(cache, tokens) for tokens in (A, B, C)]
    assert found == [[False, False], [True, True], [True, True]], "as in priority"


def test_others_never_drop_the_copies_of_a_conversation() -> None:
    cache = make_cache(2)
    add(cache, A, returns_at=5.0)
    cache.evict(2)
    add(cache, B)
    cache.evict(2)
    assert [copied(cache, A), copied(cache, B)] == [[True, True], [False, False]]


def test_of_two_conversations_the_one_that_returns_later_loses_its_copies() -> None:
    cache = make_cache(2)
    add(cache, A, returns_at=50.0)
    cache.evict(2)
    add(cache, B, returns_at=5.0)
    cache.evict(2)
    assert [copied(cache, A), copied(cache, B)] == [[False, False], [True, True]]


def test_a_conversation_that_returns_later_drops_no_copies() -> None:
    cache = make_cache(2)
    add(cache, A, returns_at=5.0)
    cache.evict(2)
    add(cache, B, returns_at=50.0)
    cache.evict(2)
    assert [copied(cache, A), copied(cache, B)] == [[True, True], [False, False]]


def test_after_its_pause_a_conversation_has_copies_as_all_others() -> None:
    cache = make_cache(2)
    add(cache, A, returns_at=5.0)
    cache.evict(2)
    cache.end_pause("talk 1")
    add(cache, B)
    cache.evict(2)
    assert [copied(cache, A), copied(cache, B)] == [[False, False], [True, True]]


def test_a_shared_page_counts_for_the_conversation_that_returns_first() -> None:
    cache = make_cache(3)
    add(cache, A + B, returns_at=50.0)
    cache.evict(1)
    cache.pauses["other"] = type(cache.pauses["talk 2"])(None, 5.0, LATER, page_keys(A, 2)[:1])
    cache.evict(3)
    add(cache, C, returns_at=9.0)
    cache.evict(2)
    assert copied(cache, A)[0], "the first page is needed at time 5"
    assert copied(cache, C) == [True, True]


def test_a_prefix_that_is_larger_than_the_host_keeps_its_beginning() -> None:
    cache = make_cache(3)
    add(cache, A + B, returns_at=5.0)
    cache.evict(4)
    assert copied(cache, A + B) == [True, True, True, False], "no page of its own is dropped"


def test_pages_that_are_computed_faster_are_dropped() -> None:
    """Two copies of a page take 2 s, computing its two tokens 1 s."""
    cache = make_cache(8)
    cache.costs.page_seconds, cache.costs.token_seconds = 1.0, 0.5
    add(cache, D, returns_at=5.0)
    cache.evict(2)
    assert copied(cache, D) == [False, False]
