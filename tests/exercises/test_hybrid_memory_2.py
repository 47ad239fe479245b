"""hybrid_memory.2: the tree finds prefixes that every group can resume from."""

from __future__ import annotations

from milestones.electives.hybrid_memory.hybrid_radix_cache import HybridRadixCache
from milestones.electives.hybrid_memory.kv_groups import BlockAllocator, KVCacheGroupSpec

PAGE_SIZE, WINDOW = 4, 8
TOKENS = list(range(100, 116))  # four blocks


def make_cache(*windows: int) -> HybridRadixCache:
    """Return an empty tree for full attention and a group with each of the windows."""
    groups = [KVCacheGroupSpec((0,))]
    groups += [KVCacheGroupSpec((1,), window) for window in windows or (WINDOW,)]
    return HybridRadixCache(PAGE_SIZE, BlockAllocator(60, PAGE_SIZE, groups))


def cached(cache: HybridRadixCache, tokens: list[int]) -> list[int]:
    """Add a prefix of new blocks. Return its blocks."""
    blocks = cache.allocator.allocate(len(tokens) // PAGE_SIZE)
    return cache.insert(tokens, blocks).prefix_pages()


def lose(cache: HybridRadixCache, *blocks: int, number: int = 0) -> None:
    """Drop the pages of blocks in a group with a window."""
    for block in blocks:
        cache.allocator.drop(cache.windows[number], block)


def tree_without(*places: int, windows: tuple[int, ...] = ()) -> tuple[HybridRadixCache, list[int]]:
    """Return a tree with `TOKENS`, and its blocks. Those at these places have lost their pages."""
    cache = make_cache(*windows)
    blocks = cached(cache, TOKENS)
    lose(cache, *(blocks[place] for place in places))
    return cache, blocks


def found(cache: HybridRadixCache, tokens: list[int]) -> int:
    """Return the number of tokens that are found, with and without a change of the tree."""
    prefix = cache.find(tokens)
    node = cache.match_prefix(tokens)
    assert node.num_prefix_pages == prefix.num_pages, "find and match_prefix agree"
    return prefix.num_pages * PAGE_SIZE


def test_a_window_that_is_whole_is_enough() -> None:
    cache, blocks = tree_without(0, 1)
    assert cache.resumable(blocks) == 4, "the query at position 16 sees 9 to 16"


def test_a_shorter_prefix_needs_other_pages() -> None:
    """The prefix of 12 tokens needs the page of block 1, and that of 8 needs block 0."""
    cache, blocks = tree_without(0, 1)
    assert cache.resumable(blocks[:3]) == 0, "a gap is in each window"


def test_the_longest_of_several() -> None:
    cache, blocks = tree_without(2)
    assert cache.resumable(blocks) == 2, "with 3 or 4 blocks, block 2 would be in the window"


def test_each_group_must_resume() -> None:
    cache, blocks = tree_without(windows=(8, 4))
    lose(cache, blocks[3], number=1)
    assert cache.resumable(blocks) == 3, "the second group lacks the last page"
    lose(cache, blocks[1], number=0)
    assert cache.resumable(blocks) == 1, "the first group lacks a page for 2 and for 3 blocks"


def test_a_window_shorter_than_a_page() -> None:
    cache, blocks = tree_without(0, 1, 2, windows=(2,))
    assert (cache.resumable(blocks), cache.resumable(blocks[:3])) == (4, 0), "only its last page"


def test_requests_find_what_can_be_resumed() -> None:
    """I1: the tree has all 16 tokens, but a request of 13 to 16 tokens must not use 12."""
    cache, _blocks = tree_without(0, 1)
    assert (found(cache, TOKENS), found(cache, TOKENS[:12])) == (16, 0), "16 tokens, or none"


def test_the_end_of_a_leaf_without_a_page_is_removed() -> None:
    cache, blocks = tree_without()
    leaf = cache.match_prefix(TOKENS)
    lose(cache, blocks[2], blocks[3])
    assert sorted(cache.trim(leaf)) == sorted(blocks[2:]), "no request can resume at their ends"
    assert (leaf.pages, cache.evictable_size) == (blocks[:2], 2), "the others stay"
    cache.check_invariants([])


def test_a_leaf_that_has_lost_all_pages_is_removed_with_its_parent() -> None:
    cache = make_cache()
    blocks = cached(cache, TOKENS[:8])
    leaf_blocks = cached(cache, TOKENS)[2:]
    leaf = cache.match_prefix(TOKENS)
    lose(cache, blocks[1], *leaf_blocks)
    assert sorted(cache.trim(leaf)) == sorted([blocks[1], *leaf_blocks]), "up to a whole block"
    assert found(cache, TOKENS) == 4, "the first block is left"
    cache.check_invariants([])


def test_a_complete_leaf_stays() -> None:
    cache, _blocks = tree_without(0, 1)
    leaf = cache.match_prefix(TOKENS)
    assert cache.trim(leaf) == [], "its last block has all its pages"
    assert cache.resumable(leaf.pages) == 4, "requests can resume at its end"


def test_a_locked_leaf_stays() -> None:
    """I3: a request reads the pages of full attention."""
    cache, blocks = tree_without()
    leaf = cache.match_prefix(TOKENS)
    cache.lock(leaf)
    lose(cache, *blocks)
    assert cache.trim(leaf) == [], "a request holds it"
    cache.unlock(leaf)
    assert sorted(cache.trim(leaf)) == sorted(blocks), "now nothing does"
