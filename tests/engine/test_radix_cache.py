"""The radix tree compared with a brute-force model; the cost of operations.

Single calls, and the order of eviction, are in `tests/exercises/test_m4_1.py` to `test_m4_3.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import ModuleOf, schedules

pytestmark = [pytest.mark.since("m4_radix"), pytest.mark.only_of("radix_cache.py")]

Prefix = tuple[int, ...]


class TreeMachine(RuleBasedStateMachine):
    """Compares the tree with a dict from each cached prefix of whole pages to its last page.

    The pages come from a pool that the test owns. Evicted pages go back into this pool.
    """

    tree_class: type
    page_size: int
    locks: Bundle[Any] = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.tree = self.tree_class(self.page_size)
        self.free_pages = list(range(1, 25))
        self.model: dict[Prefix, int] = {}
        self.held: list[tuple[Any, Prefix]] = []

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        size = self.page_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def cached(self, tokens: list[int]) -> list[int]:
        """Return the pages of the longest cached prefix, as the model has it."""
        pages: list[int] = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.model:
                break
            pages.append(self.model[prefix])
        return pages

    @rule(tokens=st.lists(st.integers(0, 2), max_size=14))
    def insert(self, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        prefixes, there = self.prefixes(tokens), self.cached(tokens)
        if len(prefixes) - len(there) > len(self.free_pages):
            return
        own = [self.free_pages.pop() for _ in prefixes[len(there) :]]
        node = self.tree.insert(tokens, [0] * len(there) + own)  # 0: the caller's copy of a page
        self.model.update(zip(prefixes[len(there) :], own, strict=True))
        assert node.prefix_pages() == there + own

    @rule(target=locks, tokens=st.lists(st.integers(0, 2), max_size=14))
    def match_and_lock(self, tokens: list[int]) -> Any:
        pages = self.cached(tokens)
        found = self.tree.find(tokens)
        assert found.num_pages == len(pages) and found.num_locked <= found.num_pages
        node = self.tree.match_prefix(tokens)
        assert node.prefix_pages() == pages
        self.tree.lock(node)
        held = (node, tuple(tokens[: len(pages) * self.page_size]))
        self.held.append(held)
        return held

    @rule(held=consumes(locks))
    def unlock(self, held: tuple[Any, Prefix]) -> None:
        self.tree.unlock(held[0])
        self.held.remove(held)

    @precondition(lambda self: self.tree.evictable_size > 0)
    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        count = max(1, int(share * self.tree.evictable_size))
        taken = self.tree.evict(count)
        assert len(taken) == len(set(taken)) == count
        gone = [prefix for prefix, page in self.model.items() if page in taken]
        assert len(gone) == count, "an evicted page was not in the tree"
        for prefix in gone:
            del self.model[prefix]
        self.free_pages += taken

    @invariant()
    def same_as_the_model(self) -> None:
        self.tree.check_invariants([node for node, _prefix in self.held])
        size, spelled = self.page_size, {}
        for node in self.tree.nodes():
            tokens = [t for n in node.path() for t in n.tokens]
            for i, page in enumerate(node.prefix_pages(), start=1):
                spelled[tuple(tokens[: i * size])] = page
        assert spelled == self.model
        locked = {prefix[:n] for _node, prefix in self.held for n in range(size, len(prefix) + 1)}
        protected = [prefix for prefix in self.model if prefix in locked]
        assert self.tree.protected_size == len(protected), "a locked page is not protected"
        assert self.tree.evictable_size == len(self.model) - len(protected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_tree_is_a_dict_of_prefixes(module_of: ModuleOf, size: int) -> None:
    class Machine(TreeMachine):
        tree_class = module_of("radix_cache").RadixCache
        page_size = size

    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=schedules(150), stateful_step_count=40, deadline=None),
    )


class Counted(tuple[int, ...]):
    """A key that counts how often it is hashed. Each hash is one step down the tree."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return super().__hash__()


@pytest.mark.parametrize("sequences", [10, 10_000])
def test_the_cost_does_not_grow_with_the_tree(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """A match looks only at the nodes on its path, and an eviction at the leaves it evicts."""
    tree = module_of("radix_cache").RadixCache(1)
    for i in range(sequences):
        tree.insert([0, i, 1, 2], [4 * i + j for j in range(4)])
    key = tree._key
    monkeypatch.setattr(tree, "_key", lambda tokens: Counted(key(tokens)))
    Counted.looked_up = 0
    tree.lock(node := tree.match_prefix([0, 5, 1, 2]))
    tree.unlock(node)
    assert 0 < Counted.looked_up <= 4
    is_evictable, considered = tree._is_evictable, list[Any]()

    def watched(node: Any) -> bool:
        considered.append(node)
        return bool(is_evictable(node))

    monkeypatch.setattr(tree, "_is_evictable", watched)
    tree.evict(6)
    assert 0 < len(considered) <= 8
