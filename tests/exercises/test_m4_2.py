"""m4.2: computed tokens enter the tree, and a request locks the prefix that it reads."""

from __future__ import annotations

import random

import pytest

from m4_radix.radix_cache import RadixCache, TreeNode
from tests.exercises.radix_states import audit, hang, lock_by_hand, offer_leaves, picture


def stem_tree() -> tuple[RadixCache, TreeNode]:
    """Return a tree with one cached prefix: tokens 1 2 3 4 in pages 7 8, used at time 4."""
    tree = RadixCache(2)
    node = hang(tree, tree.root, [1, 2, 3, 4], [7, 8], used=4)
    return offer_leaves(tree), node


def test_a_prefix_enters_an_empty_tree() -> None:
    tree = RadixCache(2)
    node = tree.insert([1, 2, 3, 4], [7, 8])
    assert picture(tree) == {"1 2 3 4": "pages 7 8"}, "one node has the whole prefix"
    assert node.prefix_pages() == [7, 8], "insert returns the node at the end of the prefix"
    assert tree.evictable_size == 2, "no request has locked the pages: both can be evicted"
    audit(tree, [], "after insert([1, 2, 3, 4], [7, 8]) into an empty tree")


@pytest.mark.parametrize(
    ("tokens", "found", "expected"),
    [
        ([1, 2, 3, 4], [7, 8], {"1 2 3 4": "pages 7 8"}),
        ([1, 2], [7], {"1 2": "pages 7", "1 2 / 3 4": "pages 8"}),
        (
            [1, 2, 9, 9],
            [7, 21],
            {"1 2": "pages 7", "1 2 / 3 4": "pages 8", "1 2 / 9 9": "pages 21"},
        ),
    ],
    ids=["the same prefix", "its beginning", "a branch"],
)
def test_what_the_tree_has_it_keeps(
    tokens: list[int], found: list[int], expected: dict[str, str]
) -> None:
    """Two requests computed the same tokens. The pages of the second must not enter the tree."""
    tree, _node = stem_tree()
    node = tree.insert(tokens, [20, 21][: len(found)])
    assert picture(tree) == expected, "I3: the tree keeps its own pages"
    assert node.prefix_pages() == found, "prefix_pages() tells the caller which pages to use"
    audit(tree, [], f"after inserting {tokens} beside 1 2 3 4")


def test_of_a_longer_prefix_the_tree_takes_the_rest() -> None:
    tree, _node = stem_tree()
    leaf = tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [20, 21, 22, 23])
    assert picture(tree) == {"1 2 3 4": "pages 7 8", "1 2 3 4 / 5 6 7 8": "pages 22 23"}, (
        "the tree has the first two pages already, and takes the last two of the caller's four"
    )
    assert leaf.prefix_pages() == [7, 8, 22, 23]
    assert tree.evictable_size == 4
    audit(tree, [], "after inserting a longer prefix")


def test_what_is_inserted_counts_as_used() -> None:
    tree, node = stem_tree()
    leaf = tree.insert([1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert leaf.last_used == node.last_used > 4, (
        "insert uses both nodes now; a leaf that seems old is evicted first"
    )


def test_the_tree_owns_its_lists() -> None:
    """The caller's lists may be rows of a page table, which change with every step."""
    tree = RadixCache(1)
    tokens, pages = [1, 2], [7, 8]
    node = tree.insert(tokens, pages)
    tokens.append(99)
    pages[0] = 55
    assert (node.tokens, node.pages) == ([1, 2], [7, 8]), (
        "I3: the caller changed its own lists after insert, and the node changed with them"
    )
    tree, _stem = stem_tree()
    row = [7, 8, 9]
    tree.insert([1, 2, 3, 4, 5, 6], row)
    assert row == [7, 8, 9], "I3: insert must not change the caller's list: it is a request's row"


def test_a_lock_protects_the_whole_path() -> None:
    tree, stem = stem_tree()
    leaf = hang(tree, stem, [5, 6], [9])
    offer_leaves(tree)
    tree.lock(leaf)
    assert picture(tree) == {
        "1 2 3 4": "pages 7 8, locks 1",
        "1 2 3 4 / 5 6": "pages 9, locks 1",
    }, "I3: a request reads every page of its prefix, so every node of the path has its lock"
    assert (tree.protected_size, tree.evictable_size) == (3, 0), (
        "I3: all 3 pages of the path are protected, and none can be evicted"
    )
    audit(tree, [leaf], "after lock of a leaf under a stem")
    tree.lock(stem)
    assert (stem.lock_count, leaf.lock_count) == (2, 1), "two requests read the stem, one the leaf"
    assert tree.protected_size == 3, "a page that two requests read counts once"
    audit(tree, [leaf, stem], "after two locks on one path")


def test_an_empty_prefix_is_locked_too() -> None:
    """A request without a cached prefix locks the root: each lock has its unlock."""
    tree, _stem = stem_tree()
    tree.lock(tree.root)
    assert tree.root.lock_count == 1, "I3: a lock on a path counts at the root too"
    assert tree.protected_size == 0, "the root has no pages"
    audit(tree, [tree.root], "after lock(root)")
    tree.unlock(tree.root)
    audit(tree, [], "after unlock(root)")


def test_the_last_unlock_gives_the_pages_up() -> None:
    tree, stem = stem_tree()
    lock_by_hand(tree, stem)
    lock_by_hand(tree, stem)
    tree.unlock(stem)
    assert (stem.lock_count, tree.evictable_size) == (1, 0), "one request still reads the pages"
    tree.unlock(stem)
    assert (stem.lock_count, tree.evictable_size, tree.protected_size) == (0, 2, 0)
    audit(tree, [], "after the last unlock of a leaf")


def test_more_unlocks_than_locks_are_refused() -> None:
    """`unlock` raises an `AssertionError` (I3) if there is no lock that it could undo."""
    tree, stem = stem_tree()
    lock_by_hand(tree, stem)
    tree.unlock(stem)
    try:
        tree.unlock(stem)
    except AssertionError as refusal:
        assert str(refusal).startswith("I3"), "the message of the refusal names the invariant"
    else:
        raise AssertionError(
            f"I3: one lock and two unlocks: the second unlock must raise an AssertionError; "
            f"lock_count is {stem.lock_count} now"
        )


def test_a_leaf_that_was_locked_all_its_life_can_be_evicted_after() -> None:
    """A locked leaf has never been offered for eviction: unlock must offer it."""
    tree = RadixCache(1)
    leaf = hang(tree, tree.root, [1, 2], [7, 8])
    lock_by_hand(tree, leaf)
    tree.unlock(leaf)
    audit(tree, [], "after the only unlock of a leaf that was never offered")


def test_a_handle_from_before_a_split_unlocks_both_halves() -> None:
    tree, handle = stem_tree()
    tree.lock(handle)
    tree.match_prefix([1, 2, 9, 9])  # splits the node that the request holds
    tree.unlock(handle)
    assert picture(tree) == {"1 2": "pages 7", "1 2 / 3 4": "pages 8"}, (
        "I3: one lock before the split and one unlock after it: no lock is left"
    )
    assert (tree.protected_size, tree.evictable_size) == (0, 2)
    audit(tree, [], "after lock, split, unlock")


def test_random_prefixes_against_a_dictionary() -> None:
    """Insert, lock and unlock at random; the tree must agree with a dictionary of prefixes."""
    chance = random.Random(4)
    tree, pages_of, held, next_page = RadixCache(2), {}, [], 1  # type: ignore[var-annotated]
    for turn in range(400):
        tokens = [chance.randrange(2) for _ in range(2 * chance.randint(1, 5))]
        pages = list(range(next_page, next_page + len(tokens) // 2))
        next_page += len(pages)
        node = tree.insert(tokens, pages)
        for i, page in enumerate(pages, start=1):
            pages_of.setdefault(tuple(tokens[: 2 * i]), page)
        expected = [pages_of[tuple(tokens[: 2 * i])] for i in range(1, len(pages) + 1)]
        assert node.prefix_pages() == expected, f"turn {turn}: insert({tokens})"
        if chance.random() < 0.6:
            tree.lock(node)
            held.append(node)
        if held and chance.random() < 0.4:
            tree.unlock(held.pop(chance.randrange(len(held))))
        audit(tree, held, f"turn {turn}, {len(held)} locks held")
    while held:
        tree.unlock(held.pop())
    assert tree.protected_size == 0, "I3: no lock is held, and no page is protected"
    assert tree.evictable_size == len(pages_of)
