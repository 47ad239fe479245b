"""A radix tree in which a block may have lost its pages of the groups with windows.

The tree itself is that of m5, and its pages are blocks. A prefix of h tokens is found only if each
group can resume from it: a group with a window needs the pages that the query at position h sees.

    block            0   1   2   3
    full attention   4   9   2   6
    window           .   .   3   8      of 2 blocks: 4 blocks are found, but not the first 1, 2 or 3

SGLang calls a block without a page a tombstone (SWA radix cache). Plain Python data, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from .kv_groups import BlockAllocator, WindowPages
from .radix_cache import CachedPrefix, RadixCache, TreeNode
from .state_slots import StateSlots


class HybridRadixCache(RadixCache):
    """A tree of blocks. Without groups with windows, it is the tree of m5."""

    def __init__(self, page_size: int, allocator: BlockAllocator) -> None:
        super().__init__(page_size)
        self.allocator = allocator
        self.windows = allocator.windows
        self.groups: list[WindowPages | StateSlots] = [*allocator.windows, *allocator.states]

    @property
    def num_evictable_pages(self) -> int:
        """Pages of all groups that `evict` can free."""
        idle = sum(len(window.pages) - len(window.uses) for window in self.windows)
        return self.evictable_size * self.allocator.has_full + idle

    def find(self, token_ids: Sequence[int]) -> CachedPrefix:
        """Return the longest cached prefix that all groups can resume from.

        `num_locked` counts the pages of all groups that are in use already.
        """
        found = super().find(token_ids)
        if not self.groups:
            return found
        blocks = found.node.prefix_pages()[: found.num_pages]
        blocks = blocks[: self.resumable(blocks)]
        found = super().find(token_ids[: len(blocks) * self.page_size])
        used = sum(b in window.uses for window in self.windows for b in self._seen(window, blocks))
        return found._replace(num_locked=found.num_locked * self.allocator.has_full + used)

    def num_known_pages(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest prefix in the tree, in blocks that may lack pages."""
        return super().find(token_ids).num_pages

    def resumable(self, blocks: Sequence[int]) -> int:
        """Return the length of the longest beginning of `blocks` that all groups can resume from.

        Each group with a window must have the pages that the next query sees, and a group with
        states the snapshot at the end.
        """
        for count in range(len(blocks), 0, -1):
            if all(b in g.pages for g in self.groups for b in self._seen(g, blocks[:count])):
                return count
        return 0

    def match_prefix(self, token_ids: Sequence[int]) -> TreeNode:
        """Return the node that ends the longest prefix that all groups can resume from.

        The caller must lock it, and use the pages in the windows, before anything can evict them.
        """
        if self.groups:
            token_ids = token_ids[: self.find(token_ids).num_pages * self.page_size]
        return super().match_prefix(token_ids)

    def evict(self, num_pages: int) -> list[int]:
        """Free at least `num_pages` pages, apart from those of the blocks that are returned.

        First, drop pages of windows that are not needed to resume at the end of a node. Then remove
        leaves, as in m5, each block with its pages of all groups. Last, drop the pages at the ends
        of locked nodes. Each time, the least recently used node comes first. The search looks at
        all nodes. Raises `AssertionError` (I3) if fewer than `num_pages` are evictable.
        """
        if not self.groups:
            return super().evict(num_pages)
        assert num_pages <= self.num_evictable_pages, f"I3: {num_pages} pages are not evictable"
        wanted = self.num_evictable_pages - num_pages
        self._drop_idle(wanted, spare_ends=True)
        while self.num_evictable_pages > wanted and self.evictable_size:
            self.allocator.free(super().evict(1))
        self._drop_idle(wanted, spare_ends=False)
        return [block for node in list(self.nodes()) for block in self.trim(node)]

    def evict_snapshot(self) -> list[int]:
        """Drop the least recently used snapshot. Return the blocks of which no end is left.

        A node with a branch was used when its children were, so its children come first.
        """
        for node in sorted(self.nodes(), key=lambda n: (n.last_used, -n.num_prefix_pages)):
            for states in self.allocator.states:
                if kept := [block for block in node.pages if block in states.pages]:
                    states.drop(kept[0])
                    return self.trim(node)
        return []

    def trim(self, node: TreeNode) -> list[int]:
        """Remove and return the blocks at the end of an unlocked leaf that have lost a page."""
        blocks: list[int] = []
        while self._is_evictable(node) and not self._is_complete(node.pages[-1]):
            parent = node.parent or self.root
            blocks += self._shorten(node, 1)
            self.evictable_size -= 1
            node = node if node.pages else parent
        return blocks

    def check_leaves(self) -> None:
        """Raise `AssertionError` if an unlocked leaf ends with a block that has lost a page."""
        for node in self.nodes():
            complete = not self._is_evictable(node) or self._is_complete(node.pages[-1])
            assert complete, "I3: no request can resume at the end of this leaf"

    def _drop_idle(self, wanted: int, *, spare_ends: bool) -> None:
        """Free pages of windows that are not in use, until only `wanted` pages are evictable.

        spare_ends: keep the pages that are needed to resume at the end of a node.
        """
        for node in sorted(self.nodes(), key=lambda node: node.last_used):
            for window in self.windows:
                spared = self._seen(window, node.prefix_pages()) if spare_ends else []
                for block in node.pages:
                    if self.num_evictable_pages <= wanted:
                        return
                    if block not in window.uses and block not in spared:
                        self.allocator.drop(window, block)

    def _seen(self, group: WindowPages | StateSlots, blocks: Sequence[int]) -> Sequence[int]:
        """Return those of the blocks of a prefix that the query after the prefix sees.

        In a group with states, it is the block that ends the prefix.
        """
        return blocks[group.first_block(len(blocks) * self.page_size) :]

    def _is_complete(self, block: int) -> bool:
        return all(block in group.pages for group in self.groups)
