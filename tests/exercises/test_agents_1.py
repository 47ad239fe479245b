"""agents.1: the pages of paused conversations are evicted last, and they are evicted."""

from __future__ import annotations

from milestones.electives.agents.radix_cache import TreeNode

from milestones.electives.agents.hi_radix_cache import HiRadixCache

PAGE_SIZE = 2
A, B, C, D = ([first] * 4 for first in (1, 2, 3, 4))  # prefixes of two pages
LATER = 1e6


def make_cache() -> HiRadixCache:
    """Return an empty tree with pages of two tokens, without host memory, at time 0."""
    cache = HiRadixCache(PAGE_SIZE)
    cache.now = lambda: 0.0
    cache.back_up = nothing  # type: ignore[method-assign] # of agents.2
    return cache


def nothing(node: TreeNode) -> None:
    """Copy no page."""


def cached(cache: HiRadixCache, tokens: list[int], first_page: int) -> TreeNode:
    """Add a prefix in pages that begin with `first_page`. Return the node that ends it."""
    return cache.insert(tokens, list(range(first_page, first_page + len(tokens) // PAGE_SIZE)))


def paused(
    cache: HiRadixCache, name: str, tokens: list[int], page: int, returns_at: float
) -> TreeNode:
    """Add the prefix of a conversation that pauses, with a protection that lasts."""
    node = cached(cache, tokens, page)
    cache.protect(name, node, returns_at, LATER)
    return node


def test_a_protected_prefix_is_evicted_after_newer_ones() -> None:
    cache = make_cache()
    paused(cache, "a", A, 10, returns_at=5.0)
    cached(cache, B, 20)
    assert sorted(cache.evict(2)) == [20, 21], "A is older, but its conversation comes back"
    cache.check_invariants([])


def test_without_other_pages_protected_ones_are_evicted() -> None:
    """I5: they are evictable, so a request may count on them."""
    cache = make_cache()
    paused(cache, "a", A, 10, returns_at=5.0)
    assert cache.evictable_size == 2, "a protection is no lock"
    assert cache.evict(1) == [11], "from the end, as always"
    cache.check_invariants([])
    assert cache.evict(1) == [10], "the rest has lost its protection with the first page"


def test_the_conversation_that_returns_latest_goes_first() -> None:
    cache = make_cache()
    paused(cache, "a", A, 10, returns_at=5.0)
    paused(cache, "b", B, 20, returns_at=50.0)
    paused(cache, "c", C, 30, returns_at=0.5)
    found = [sorted(cache.evict(2)) for _ in range(3)]
    assert found == [[20, 21], [10, 11], [30, 31]], "by the time of return, the latest first"


def test_a_part_of_the_pages_takes_the_protection_of_one_conversation() -> None:
    cache = make_cache()
    paused(cache, "a", A, 10, returns_at=5.0)
    paused(cache, "b", B, 20, returns_at=50.0)
    assert cache.evict(1) == [21], "b returns latest"
    assert cache.num_demoted == 1, "one conversation was enough"
    assert cache.evict(2) == [20, 11], "first the rest of b, then the end of a"


def test_a_locked_conversation_gives_no_pages() -> None:
    """Another request reads its prefix: ending its protection would free nothing."""
    cache = make_cache()
    node = paused(cache, "late", A, 10, returns_at=99.0)
    cache.lock(node)
    paused(cache, "b", B, 20, returns_at=5.0)
    assert sorted(cache.evict(2)) == [20, 21], "A is locked"
    assert cache.pauses["late"].node is node, "and it keeps its protection"
    cache.unlock(node)
    cache.check_invariants([])


def test_a_protection_ends_with_its_time() -> None:
    cache = make_cache()
    cache.protect("a", cached(cache, A, 10), 5.0, until=8.0)
    cached(cache, B, 20)
    cache.now = lambda: 9.0
    assert sorted(cache.evict(2)) == [10, 11], "the time is over, and A is the oldest"
    assert cache.pauses == {}, "the pause is forgotten"


def test_the_next_call_replaces_the_protected_prefix() -> None:
    """The conversation goes on: its longer prefix is protected, and the old end is inside it."""
    cache = make_cache()
    paused(cache, "a", A, 10, returns_at=5.0)
    cache.end_pause("a")
    longer = paused(cache, "a", A + B, 10, returns_at=7.0)
    assert list(cache.pauses) == ["a"] and cache.pauses["a"].node is longer
    assert dict(cache.protections) == {longer: 1}, "the old node is not protected twice"
    cached(cache, C, 30)
    assert sorted(cache.evict(2)) == [30, 31], "the whole conversation stays"


def test_a_branch_that_no_call_will_use_goes_first() -> None:
    """The history was rewritten. What the new call does not use is evicted before older pages."""
    cache = make_cache()
    cached(cache, D, 40)
    paused(cache, "a", A + B, 10, returns_at=5.0)
    cache.lock(node := cached(cache, A + C, 30))
    cache.end_pause("a")
    cache.unlock(node)
    assert sorted(cache.evict(2)) == [12, 13], "B behind A was replaced"
    assert sorted(cache.evict(2)) == [40, 41], "then the oldest: A and C were just used"


def test_an_ended_conversation_goes_first_with_all_its_nodes() -> None:
    cache = make_cache()
    cached(cache, D, 40)
    cached(cache, A, 10)
    cache.release(cached(cache, A + B, 10))
    assert cache.evict(4) == [12, 13, 10, 11], "both nodes of it, from the end"
    cache.check_invariants([])


def test_a_shared_beginning_stays() -> None:
    """A belongs to another prefix, too. It was used last, so it is evicted after D."""
    cache = make_cache()
    cached(cache, A + C, 30)
    cached(cache, D, 40)
    cache.release(cached(cache, A + B, 10))
    found = [sorted(cache.evict(2)) for _ in range(3)]
    assert found == [[12, 13], [32, 33], [40, 41]], "B is over; C is the oldest; A is the newest"


def test_a_released_prefix_may_end_in_the_middle_of_another_one() -> None:
    """Another conversation has gone on from it, so nothing of it is over."""
    cache = make_cache()
    cached(cache, D, 40)
    cached(cache, A + B, 10)
    cache.release(cache.match_prefix(A))
    assert sorted(cache.evict(2)) == [40, 41]


def test_what_is_released_and_used_again_is_as_all_others() -> None:
    cache = make_cache()
    cache.release(cached(cache, A, 10))
    cached(cache, B, 20)
    cache.match_prefix(A)
    assert sorted(cache.evict(2)) == [20, 21]
    cache.check_invariants([])


def test_the_root_is_not_protected() -> None:
    """A prompt without a whole page has no prefix in the tree."""
    cache = make_cache()
    cache.protect("a", cache.root, 5.0, LATER)
    assert cache.pauses == {} and not cache.protections
