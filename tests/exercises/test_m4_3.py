"""m4.3: pages that no request reads are evicted when memory is needed, the oldest leaf first."""

from __future__ import annotations

import pytest

from m4_radix.radix_cache import RadixCache, TreeNode
from tests.exercises.radix_states import audit, hang, lock_by_hand, offer_leaves, picture


def three_leaves() -> tuple[RadixCache, dict[str, TreeNode]]:
    """Return a stem with two branches, and a leaf beside it. Ages differ; a page is one token."""
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
    """The rest of the leaf is still a prefix that a later request may use."""
    tree, nodes = three_leaves()
    assert tree.evict(1) == [4], "evict(1) takes the last page of the oldest leaf"
    old = nodes["old"]
    assert (old.tokens, old.pages, old.num_prefix_pages) == ([3], [3], 3), (
        "tokens, pages and num_prefix_pages are all shortened: of 1 2 / 3 4, 1 2 / 3 is left"
    )
    assert tree.evictable_size == 6
    audit(tree, [], "after evict(1)")


def test_what_is_left_of_a_leaf_can_be_evicted_too() -> None:
    tree, _nodes = three_leaves()
    taken = [tree.evict(1), tree.evict(1), tree.evict(1)]
    assert taken == [[4], [3], [7]], "page by page, first all of the oldest leaf"
    audit(tree, [], "after evict(1) three times")


def test_one_call_takes_from_as_many_leaves_as_it_needs() -> None:
    tree, _nodes = three_leaves()
    taken = tree.evict(3)
    assert sorted(taken) == [3, 4, 7], (
        f"evict(3) takes all of the oldest leaf (3 4) and the end of the next (6 7), not {taken}"
    )
    assert tree.evictable_size == 4, "seven pages were cached, three are taken"
    audit(tree, [], "after evict(3)")


def test_a_parent_goes_when_it_has_become_a_leaf() -> None:
    tree, _nodes = three_leaves()
    assert sorted(tree.evict(5)) == [3, 4, 5, 6, 7], "evict(5) takes the leaves, not their parent"
    audit(tree, [], "after evict(5), which took all the leaves")
    assert tree.evict(1) == [2], "now the stem is a leaf, and is shortened from its end"
    assert tree.evict(1) == [1]
    assert picture(tree) == {} and tree.evictable_size == 0
    audit(tree, [], "after everything was evicted")


def test_a_parent_may_go_in_the_same_call() -> None:
    tree, _nodes = three_leaves()
    taken = tree.evict(7)
    assert sorted(taken) == [1, 2, 3, 4, 5, 6, 7], f"all seven cached pages can be evicted: {taken}"
    assert not tree.root.children, "a node without pages leaves the tree"
    audit(tree, [], "after evict(7), which took all pages")


def test_a_locked_leaf_stays_however_old_it_is() -> None:
    tree, nodes = three_leaves()
    lock_by_hand(tree, nodes["old"])
    taken = tree.evict(3)
    assert set(taken) == {5, 6, 7}, (
        f"I3: a request reads pages 3 4, and 1 2 above them; evict(3) took {taken}"
    )
    audit(tree, [nodes["old"]], "after evict(3) with the oldest leaf locked")


def test_more_than_can_be_had_is_refused() -> None:
    """`evict` raises instead of taking a page that a request reads, and then it takes no page."""
    tree, nodes = three_leaves()
    lock_by_hand(tree, nodes["old"])
    before = picture(tree)
    with pytest.raises(AssertionError, match="^I3"):
        tree.evict(4)
    assert picture(tree) == before, "only three pages can be evicted: evict(4) takes none"
    audit(tree, [nodes["old"]], "after evict(4) was refused")


def test_a_leaf_that_was_used_since_it_was_offered_is_not_old() -> None:
    """Its entry in the heap is out of date: `evict` offers the leaf again with its present age."""
    tree, nodes = three_leaves()
    nodes["old"].last_used = 20
    taken = tree.evict(2)
    assert set(taken) == {6, 7}, (
        f"the leaf 3 4 was offered at time 5 and used again at 20; the oldest leaf is now 6 7, "
        f"used at 7, and evict(2) took {taken}"
    )
    assert set(tree.evict(3)) == {5, 3, 4}, "then 5, used at 9, then 3 4, used at 20"
    audit(tree, [], "after evictions with a leaf used since it was offered")


def test_a_leaf_that_has_got_children_is_none() -> None:
    """The node was offered as a leaf. Then the conversation went on, and it became a parent."""
    tree = RadixCache(1)
    first = hang(tree, tree.root, [1], [1], used=1)
    offer_leaves(tree)
    hang(tree, first, [2], [2], used=2)
    offer_leaves(tree)
    assert tree.evict(1) == [2], "the only leaf has page 2; page 1 is in the middle of a prefix"
    audit(tree, [], "after evict(1) of a chain that grew")


def test_what_was_unlocked_after_a_refusal_can_be_had() -> None:
    """`evict` drops the entry of a locked leaf. After the unlock, the leaf can be evicted again."""
    tree, nodes = three_leaves()
    lock_by_hand(tree, nodes["old"])
    tree.evict(1)
    for held in (tree.root, nodes["stem"], nodes["old"]):
        held.lock_count -= 1
    tree.protected_size -= 4
    tree.evictable_size += 4
    tree._offer(nodes["old"])  # as `unlock` does
    audit(tree, [], "after a locked leaf was passed over, and then unlocked")
    assert set(tree.evict(6)) == {1, 2, 3, 4, 5, 6}, "all pages that are left can be evicted"


def test_nothing_is_taken_when_nothing_is_asked_for() -> None:
    tree, _nodes = three_leaves()
    before = picture(tree)
    assert tree.evict(0) == []
    assert picture(tree) == before and tree.evictable_size == 7


def test_each_page_is_taken_once() -> None:
    """Twenty branches are evicted in steps of different sizes: each page comes out once."""
    tree = RadixCache(2)
    for i in range(20):
        tokens, pages = [i] * 6, [3 * i + 1, 3 * i + 2, 3 * i + 3]
        hang(tree, tree.root, tokens, pages, used=(7 * i) % 20)
    offer_leaves(tree)
    taken: list[int] = []
    for bite in (1, 2, 3, 5, 8, 13, 21, 7):
        taken += tree.evict(bite)
        audit(tree, [], f"after {len(taken)} pages were evicted")
    assert sorted(taken) == list(range(1, 61)), "I3: each page is taken once, and no page is lost"
