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


@pytest.mark.parametrize(
    ("bites", "taken", "left"),
    [
        ([0], [], ["1 2", "1 2 / 3 4", "1 2 / 5", "6 7"]),
        ([1], [4], ["1 2", "1 2 / 3", "1 2 / 5", "6 7"]),
        ([2], [3, 4], ["1 2", "1 2 / 5", "6 7"]),
        ([3], [3, 4, 7], ["1 2", "1 2 / 5", "6"]),
        ([1, 1, 1], [3, 4, 7], ["1 2", "1 2 / 5", "6"]),
        ([7], [1, 2, 3, 4, 5, 6, 7], []),  # a parent may go in the same call as its children
    ],
    ids=str,
)
def test_the_leaf_used_longest_ago_goes_first(
    bites: list[int], taken: list[int], left: list[str]
) -> None:
    """A leaf is shortened from its end: the rest is a prefix that a later request may use."""
    tree, _nodes = three_leaves()
    assert sorted(page for count in bites for page in tree.evict(count)) == taken, (
        "first the leaf 3 4, used at time 5, then 6 7, used at time 7"
    )
    assert set(picture(tree)) == set(left), "these prefixes are still cached"
    assert tree.evictable_size == 7 - len(taken), "seven pages were cached"
    audit(tree, [], f"after evict({bites})")


def test_a_parent_goes_when_it_has_become_a_leaf() -> None:
    tree, _nodes = three_leaves()
    assert sorted(tree.evict(5)) == [3, 4, 5, 6, 7], "evict(5) takes the leaves, not their parent"
    audit(tree, [], "after evict(5), which took all the leaves")
    assert tree.evict(1) == [2], "now the stem is a leaf, and is shortened from its end"
    assert tree.evict(1) == [1]
    assert picture(tree) == {} and tree.evictable_size == 0
    audit(tree, [], "after everything was evicted")


def test_a_locked_leaf_stays_however_old_it_is() -> None:
    tree, nodes = three_leaves()
    lock_by_hand(tree, nodes["old"])
    taken = tree.evict(3)
    assert set(taken) == {5, 6, 7}, "I3: a request reads pages 3 4, and 1 2 above them"
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
    assert set(taken) == {6, 7}, "3 4 was used again at time 20; the oldest leaf is now 6 7"
    audit(tree, [], "after evict(2) passed over 3 4, which was used since it was offered")
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


def test_the_work_does_not_grow_with_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest leaf comes out of the heap: `evict` need not ask the others for their age."""
    tree = RadixCache(1)
    for i in range(1, 201):
        hang(tree, tree.root, [i], [i], used=i)
    offer_leaves(tree)
    ages = {node: node.last_used for node in tree.nodes()}
    asked: list[int] = []

    def last_used(node: TreeNode) -> int:
        asked.append(ages[node])
        return ages[node]

    monkeypatch.setattr(TreeNode, "last_used", property(last_used, ages.__setitem__), raising=False)
    assert sorted(tree.evict(5)) == [1, 2, 3, 4, 5], "the oldest leaves, with one page each"
    assert len(asked) <= 50, (
        f"evict(5) asked for the age of a leaf {len(asked)} times, in a tree of 200 leaves: the "
        "work must grow with the leaves that are evicted (at most 10 times for each)"
    )
    gone = [number for _age, number, node in tree._heap if not node.pages]
    assert not gone, f"I3: {len(gone)} nodes have left the tree, and the heap still holds them"


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
