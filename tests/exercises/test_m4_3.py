"""m4.3: memory that nobody reads is taken back when it is needed, the oldest leaf first."""

from __future__ import annotations

import pytest

from m4_radix.radix_cache import RadixCache, TreeNode
from tests.exercises.radix_states import audit, hang, lock_by_hand, offer_leaves, picture


def three_leaves() -> tuple[RadixCache, dict[str, TreeNode]]:
    """A stem with two branches, and a leaf of its own. Pages of one token; the ages differ."""
    tree = RadixCache(1)
    stem = hang(tree, tree.root, [1, 2], [1, 2], used=9)
    nodes = {
        "stem": stem,
        "old": hang(tree, stem, [3, 4], [3, 4], used=5),
        "new": hang(tree, stem, [5], [5], used=9),
        "alone": hang(tree, tree.root, [6, 7], [6, 7], used=7),
    }
    return offer_leaves(tree), nodes


def test_the_leaf_used_longest_ago_goes_first() -> None:
    tree, _nodes = three_leaves()
    taken = tree.evict(2)
    assert sorted(taken) == [3, 4], f"the leaf used at time 5 has pages 3 and 4, not {taken}"
    assert picture(tree) == {
        "1 2": "pages 1 2, locks 0",
        "1 2 / 5": "pages 5, locks 0",
        "6 7": "pages 6 7, locks 0",
    }
    audit(tree, [], "after evict(2)")


def test_a_leaf_is_shortened_from_its_end() -> None:
    """What is left of it is still a prefix that somebody may ask for."""
    tree, nodes = three_leaves()
    assert tree.evict(1) == [4], "one page is asked for: the last one of the oldest leaf"
    old = nodes["old"]
    assert (old.tokens, old.pages, old.end) == ([3], [3], 3), (
        "tokens, pages and end of a shortened leaf agree: 1 2 / 3 is left of 1 2 / 3 4"
    )
    assert tree.evictable_size == 6
    audit(tree, [], "after evict(1)")


def test_what_is_left_of_a_leaf_can_be_evicted_too() -> None:
    tree, _nodes = three_leaves()
    taken = [tree.evict(1), tree.evict(1), tree.evict(1)]
    assert taken == [[4], [3], [7]], f"page by page, the oldest leaf to its end first: {taken}"
    audit(tree, [], "after evict(1) three times")


def test_one_call_takes_from_as_many_leaves_as_it_needs() -> None:
    tree, _nodes = three_leaves()
    taken = tree.evict(3)
    assert sorted(taken) == [3, 4, 7], (
        f"all of the oldest leaf (3 4), and the end of the next in age (6 7): evict(3) took {taken}"
    )
    assert tree.evictable_size == 4, "seven pages were cached, three are taken"
    audit(tree, [], "after evict(3)")


def test_a_parent_goes_when_it_has_become_a_leaf() -> None:
    tree, _nodes = three_leaves()
    assert sorted(tree.evict(5)) == [3, 4, 5, 6, 7], "all leaves first: a parent is no leaf"
    audit(tree, [], "after evict(5), which took all the leaves")
    assert tree.evict(1) == [2], "now the stem is a leaf, and goes from its end"
    assert tree.evict(1) == [1]
    assert picture(tree) == {} and tree.evictable_size == 0
    audit(tree, [], "after everything was evicted")


def test_a_parent_may_go_in_the_same_call() -> None:
    tree, _nodes = three_leaves()
    taken = tree.evict(7)
    assert sorted(taken) == [1, 2, 3, 4, 5, 6, 7], f"seven pages are cached and free: {taken}"
    assert not tree.root.children, "an empty node has left the tree"
    audit(tree, [], "after evict(7), which took all there is")


def test_a_locked_leaf_stays_however_old_it_is() -> None:
    tree, nodes = three_leaves()
    lock_by_hand(tree, nodes["old"])
    taken = tree.evict(3)
    assert set(taken) == {5, 6, 7}, (
        f"I3: pages 3 4, and 1 2 above them, are being read; evict(3) took {taken}"
    )
    audit(tree, [nodes["old"]], "after evict(3) with the oldest leaf locked")


def test_more_than_can_be_had_is_refused() -> None:
    """Rather an error than a page that somebody reads; and nothing is lost by asking."""
    tree, nodes = three_leaves()
    lock_by_hand(tree, nodes["old"])
    before = picture(tree)
    with pytest.raises(AssertionError, match="^I3"):
        tree.evict(4)
    assert picture(tree) == before, "three pages can be had, four were asked for: none is taken"
    audit(tree, [nodes["old"]], "after evict(4) was refused")


def test_a_leaf_that_was_used_since_it_was_offered_is_not_old() -> None:
    """Its entry in the heap is out of date: it goes where it belongs now, not out of the tree."""
    tree, nodes = three_leaves()
    nodes["old"].last_used = 20
    taken = tree.evict(2)
    assert set(taken) == {6, 7}, (
        f"the leaf 3 4 was offered at time 5 and used again at 20; the oldest by now is 6 7, used "
        f"at 7, and evict(2) took {taken}"
    )
    assert set(tree.evict(3)) == {5, 3, 4}, "then 5, used at 9, then 3 4, used at 20"
    audit(tree, [], "after evictions with a leaf used since it was offered")


def test_a_leaf_that_has_got_children_is_none() -> None:
    """It was offered as a leaf; the conversation went on, and it is a parent now."""
    tree = RadixCache(1)
    first = hang(tree, tree.root, [1], [1], used=1)
    offer_leaves(tree)
    hang(tree, first, [2], [2], used=2)
    offer_leaves(tree)
    taken = tree.evict(1)
    assert taken == [2], f"page 2 is the only leaf; page 1 is in the middle of a prefix: {taken}"
    audit(tree, [], "after evict(1) of a chain that grew")


def test_what_was_unlocked_after_a_refusal_can_be_had() -> None:
    """An entry that eviction dropped because its leaf was locked must not be lost for good."""
    tree, nodes = three_leaves()
    lock_by_hand(tree, nodes["old"])
    tree.evict(1)
    for held in (tree.root, nodes["stem"], nodes["old"]):
        held.lock_count -= 1
    tree.protected_size -= 4
    tree.evictable_size += 4
    tree._offer(nodes["old"])  # as `unlock` does
    audit(tree, [], "after a locked leaf was passed over, and then unlocked")
    assert set(tree.evict(6)) == {1, 2, 3, 4, 5, 6}, "everything that is left can be had"


def test_nothing_is_taken_when_nothing_is_asked_for() -> None:
    tree, _nodes = three_leaves()
    before = picture(tree)
    assert tree.evict(0) == []
    assert picture(tree) == before and tree.evictable_size == 7


def test_each_page_is_taken_once() -> None:
    """Twenty branches, shortened in uneven bites: all pages come out, none of them twice."""
    tree = RadixCache(2)
    for i in range(20):
        tokens, pages = [i] * 6, [3 * i + 1, 3 * i + 2, 3 * i + 3]
        hang(tree, tree.root, tokens, pages, used=(7 * i) % 20)
    offer_leaves(tree)
    taken: list[int] = []
    for bite in (1, 2, 3, 5, 8, 13, 21, 7):
        taken += tree.evict(bite)
        audit(tree, [], f"after {len(taken)} pages were evicted")
    assert sorted(taken) == list(range(1, 61)), "I3: a page is taken once, and none is lost"
