"""m4.1: walk down the tree as far as the tokens agree, and split the node where they differ."""

from __future__ import annotations

from itertools import product

import pytest

from m4_radix.radix_cache import RadixCache, TreeNode
from tests.exercises.radix_states import audit, hang, lock_by_hand, offer_leaves, picture


def chain() -> tuple[RadixCache, TreeNode]:
    """Return a tree with one node of three pages of two tokens, used at time 5."""
    tree = RadixCache(2)
    node = hang(tree, tree.root, [1, 2, 3, 4, 5, 6], [7, 8, 9], used=5)
    return offer_leaves(tree), node


def family() -> tuple[RadixCache, TreeNode, TreeNode, TreeNode]:
    """Return a stem of two pages with two branches of one page each; a page is one token."""
    tree = RadixCache(1)
    stem = hang(tree, tree.root, [1, 2], [11, 12], used=3)
    left = hang(tree, stem, [3], [13], used=3)
    right = hang(tree, stem, [4], [14], used=2)
    return offer_leaves(tree), stem, left, right


def test_nothing_is_found_in_an_empty_tree() -> None:
    tree = RadixCache(2)
    node = tree.match_prefix([1, 2, 3, 4])
    assert node is tree.root, "an empty tree holds the empty prefix only: the root"
    assert tree.find([1, 2]).num_pages == 0, "an empty tree has no pages to find"


def test_a_match_goes_down_through_parents_to_the_last_node() -> None:
    tree, stem, left, _right = family()
    node = tree.match_prefix([1, 2, 3, 9])
    assert node is left, f"1 2 3 ends at the left branch, not at the node with tokens {node.tokens}"
    assert node.prefix_pages() == [11, 12, 13], "the pages of the whole path, in order"
    assert tree.match_prefix([1, 2, 9]) is stem, "no branch begins with 9: the match ends above"
    audit(tree, [], "after two matches that end where a node ends")


def test_a_match_that_ends_inside_a_node_splits_it() -> None:
    tree, _node = chain()
    found = tree.match_prefix([1, 2, 9, 9])
    assert picture(tree) == {"1 2": "pages 7", "1 2 / 3 4 5 6": "pages 8 9"}, (
        "the tokens agree in the first page only: the node is split after it"
    )
    assert found.prefix_pages() == [7], "the upper half ends the prefix that was found"
    assert found.num_prefix_pages == 1, "the prefix has one page"
    audit(tree, [], "after match_prefix([1, 2, 9, 9]) on one node 1..6")


def test_a_split_keeps_what_hangs_below() -> None:
    tree, stem, left, right = family()
    upper = tree.match_prefix([1, 5])
    assert upper.children == {(2,): stem}, "the lower half is the only child of the upper one"
    assert set(stem.children.values()) == {left, right}, "the lower half keeps its children"
    assert tree.match_prefix([1, 2, 4]) is right, "a split must not lose a cached prefix"
    audit(tree, [], "after a split above two branches")


def test_a_split_hands_its_locks_on() -> None:
    """A lock on the lower half protects the upper half too: both halves have the same count."""
    tree, node = chain()
    lock_by_hand(tree, node)
    lock_by_hand(tree, node)
    tree.match_prefix([1, 2, 3, 4, 9, 9])
    assert picture(tree) == {
        "1 2 3 4": "pages 7 8, locks 2",
        "1 2 3 4 / 5 6": "pages 9, locks 2",
    }, "I3: two requests read all three pages, before the split and after it"
    assert (tree.protected_size, tree.evictable_size) == (3, 0), "a split frees and locks nothing"
    audit(tree, [node, node], "after a split of a node that two requests hold")


def test_both_halves_have_the_hits_and_the_time_of_the_node() -> None:
    """Each prompt that went through the node went through both halves of it."""
    tree, node = chain()
    node.hits = 3
    upper = tree._split(node, 1)
    assert (upper.hits, upper.last_used) == (3, 5), (
        "the node had 3 hits and was used at time 5: the upper half takes both from it"
    )
    assert (node.hits, node.last_used) == (3, 5), "the lower half keeps its hits and its time"


def test_a_handle_from_before_a_split_still_spells_its_prefix() -> None:
    """A request holds its node for many steps; a split must not shorten the prefix of that node."""
    tree, handle = chain()
    tree.match_prefix([1, 2, 9, 9])
    assert handle.prefix_pages() == [7, 8, 9], (
        "the node had these pages before the split: the node that callers hold is the lower half"
    )
    assert handle.num_prefix_pages == 3, "its prefix has three pages"


@pytest.mark.parametrize(("length", "pages"), [(3, 0), (4, 1), (7, 1), (8, 2)])
@pytest.mark.parametrize("last", [[], [99]], ids=["all tokens", "then another token"])
def test_only_whole_pages_match(length: int, pages: int, last: list[int]) -> None:
    """The tree has the tokens 1 to 8 in pages of four."""
    tree = RadixCache(4)
    hang(tree, tree.root, range(1, 9), [1, 2])
    found = tree.find([*range(1, 1 + length), *last])
    assert found.num_pages == pages, f"{length} tokens agree: {pages} whole pages of 4"


def test_a_walk_ends_where_the_tokens_part() -> None:
    """The walk ends at a node that agrees only in part, even if a child's page looks right."""
    tree = RadixCache(1)
    upper = hang(tree, tree.root, [1, 2, 3], [1, 2, 3])
    hang(tree, upper, [2], [4])
    hang(tree, upper, [9], [5])
    offer_leaves(tree)
    assert tree.find([1, 2, 9, 2]).num_pages == 2, "1 2 9 2 agrees with 1 2 3 in two pages"
    found = tree.match_prefix([1, 2, 9, 2])
    assert found.prefix_pages() == [1, 2], (
        "1 2 9 2 agrees with 1 2 3 in two pages: the nodes below 1 2 3 are not part of this prompt"
    )


def test_a_walk_does_not_compare_with_what_else_is_cached() -> None:
    """A child is looked up by the tokens of its first page: other children cost nothing."""
    compared = 0

    class Token(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    tree = RadixCache(2)
    for i in range(300):
        hang(tree, tree.root, [i, 1, 2, 3], [2 * i + 1, 2 * i + 2])
    found = tree.find([Token(token) for token in (250, 1, 2, 3, 4, 5)])
    assert found.num_pages == 2, "250 1 2 3 is cached"
    assert compared <= 60, (
        f"tokens of a prompt of 6 were compared {compared} times, in a tree with 300 branches: the "
        "cost must grow with the prompt (at most 10 times for each token), not with what is cached"
    )


def test_a_look_leaves_no_trace() -> None:
    """`find` runs for every waiting request in every step: it neither splits nor renews a node."""
    tree, node = chain()
    found = tree.find([1, 2, 3, 4, 9])
    assert (found.node, found.num_pages) == (node, 2), "find returns the node with the last part"
    assert picture(tree) == {"1 2 3 4 5 6": "pages 7 8 9"}, "find must not split"
    assert node.last_used == 5, "find must not change last_used"


def test_a_match_makes_its_path_the_newest() -> None:
    """The least recently used leaf is evicted first: a match renews the matched path only."""
    tree, stem, left, right = family()
    tree.match_prefix([1, 2, 4])
    assert stem.last_used == right.last_used, "the nodes of the path are used at the same time"
    assert right.last_used > left.last_used == 3, "the other branch was not used"
    tree, lower = chain()
    upper = tree.match_prefix([1, 2, 9, 9])
    assert upper.last_used > lower.last_used == 5, "a split renews the half that was matched only"


def test_every_prompt_finds_its_longest_prefix() -> None:
    """All prompts of six tokens from {0, 1, 2}, compared with a plain dictionary of prefixes."""
    cached = {(0,): 1, (0, 1): 2, (0, 1, 2): 3, (0, 1, 0): 4, (0, 1, 0, 0): 5, (2,): 6, (2, 2): 7}
    for prompt in map(list, product(range(3), repeat=6)):
        tree = RadixCache(1)
        stem = hang(tree, tree.root, [0, 1], [1, 2])
        hang(tree, stem, [2], [3])
        hang(tree, stem, [0, 0], [4, 5])
        hang(tree, tree.root, [2, 2], [6, 7])
        offer_leaves(tree)
        expected: list[int] = []
        while page := cached.get(tuple(prompt[: len(expected) + 1])):
            expected.append(page)
        assert tree.find(prompt).num_pages == len(expected), f"find({prompt})"
        node = tree.match_prefix(prompt)
        assert node.prefix_pages() == expected, (
            f"match_prefix({prompt}), where 0 1, 0 1 2, 0 1 0 0 and 2 2 are cached"
        )
        audit(tree, [], f"after match_prefix({prompt})")
