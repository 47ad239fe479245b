"""`RadixCache`: the prefixes whose KV is in memory, as a tree. Plain Python data, no tensors.

A node holds a run of whole pages: the tokens they stand for, and the ids of the pages. The path
from the root to a node spells a prefix; prefixes that begin alike share nodes, and so pages.

    root ── "You are a tutor. " ─┬─ "What is a page?" ── " A page is ..."
            pages 7 2 9          │  pages 4 1            pages 8 3
                                 └─ "What is a tree?"
                                    pages 5 6

Upholds I3: a page in the tree is the tree's alone. Who reads a prefix locks it: locked nodes stay,
of the others the leaf that was used longest ago goes first. RadixAttention is from SGLang (Zheng et
al., NeurIPS 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class TreeNode:
    """A run of pages after the parent's. `pages[i]` holds `tokens[i * page_size:][:page_size]`."""

    def __init__(self, parent: TreeNode | None, tokens: list[int], pages: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[tuple[int, ...], TreeNode] = {}  # by the tokens of their first page
        # Pages from the root to the end of this node: the length of the prefix that it spells.
        self.end: int = len(pages) + (parent.end if parent else 0)
        self.lock_count = 0  # holders of this node and of those below it
        self.last_used = 0  # by the tree's clock, which counts uses
        self.hits = 0  # prefixes that were found through it
        self.in_heap = False

    def path(self) -> list[TreeNode]:
        """The nodes from below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix_pages(self) -> list[int]:
        """The pages of the whole prefix."""
        return [page for node in self.path() for page in node.pages]


class CachedPrefix(NamedTuple):
    """What a look at the tree has found."""

    node: TreeNode  # the last node that has a part of the prefix
    num_pages: int  # of the whole prefix
    num_locked: int  # the first so many of them are in use


class RadixCache:
    """A tree of cached prefixes. Lengths and sizes are in pages; a part of a page is not cached."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = TreeNode(None, [], [])
        self.evictable_size = 0  # pages in nodes that nobody has locked
        self.protected_size = 0  # pages in locked ones
        self._clock = 0
        # Unlocked leaves as (last_used, number, node). An entry may be out of date: see `evict`.
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._pushed = 0

    def find(self, token_ids: Sequence[int]) -> CachedPrefix:
        """The longest cached prefix, without leaving a trace."""
        node, num_pages = self.root, 0
        for child, common in self._walk(token_ids):
            node, num_pages = child, num_pages + common
        locked = node  # who is locked has locked ancestors: they are the path's first nodes
        while locked.lock_count == 0 and locked.parent is not None:
            locked = locked.parent
        return CachedPrefix(node, num_pages, min(locked.end, num_pages))

    def match_prefix(self, token_ids: Sequence[int]) -> TreeNode:
        """The node that spells the longest cached prefix, split off where the prefix ends in the
        middle of one. Its pages are safe from eviction once it is locked, and not before."""
        node = self._descend(token_ids)
        for used in node.path():
            used.hits += 1
        return node

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> TreeNode:
        """Add a prefix of whole pages whose KV is written; returns the node that spells it.

        `pages[i]` holds `token_ids[i * page_size:][:page_size]`. What the tree has already, it
        keeps: `node.prefix_pages()` says which pages count. Of the caller's own, the tree takes
        those that come after.
        """
        assert len(token_ids) == len(pages) * self.page_size, "I3: only whole pages are cached"
        node = self._descend(token_ids)
        if node.end < len(pages):
            rest = list(token_ids[node.end * self.page_size :])
            leaf = TreeNode(node, rest, list(pages[node.end :]))
            leaf.last_used = self._clock
            node.children[self._key(rest)] = leaf
            self.evictable_size += len(leaf.pages)
            self._offer(leaf)
            node = leaf
        return node

    def lock(self, node: TreeNode) -> None:
        """Protect a prefix until `unlock`."""
        for locked in (self.root, *node.path()):
            if locked.lock_count == 0 and locked is not self.root:
                self.evictable_size -= len(locked.pages)
                self.protected_size += len(locked.pages)
            locked.lock_count += 1

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock` of the same node, whatever was split since."""
        for locked in (self.root, *node.path()):
            assert locked.lock_count > 0, "I3: a node is unlocked as often as it was locked"
            locked.lock_count -= 1
            if locked.lock_count == 0 and locked is not self.root:
                self.evictable_size += len(locked.pages)
                self.protected_size -= len(locked.pages)
        self._offer(node)

    def evict(self, num_pages: int) -> list[int]:
        """Take `num_pages` pages from unlocked leaves, least recently used first, from their ends.

        A leaf has one entry in the heap at most. One that was used or locked since it entered is
        put where it belongs now, or dropped: eviction does not look at the rest of the tree. Raises
        AssertionError (I3), and takes nothing, where fewer than `num_pages` are evictable.
        """
        assert num_pages <= self.evictable_size, "I3: nothing that is in use is evicted"
        taken: list[int] = []
        while len(taken) < num_pages:
            entered, _number, leaf = heapq.heappop(self._heap)
            leaf.in_heap = False
            if self._is_evictable(leaf) and leaf.last_used == entered:
                taken += self._shorten(leaf, num_pages - len(taken))
            self._offer(leaf)
        self.evictable_size -= len(taken)
        return taken

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents first."""
        stack = [self.root]
        while stack:
            children = list(stack.pop().children.values())
            yield from children
            stack += children

    def check_invariants(self, holders: Iterable[TreeNode]) -> None:
        """`holders`: the node of each lock that is held."""
        locks: dict[TreeNode, int] = {}
        for holder in holders:
            for node in (self.root, *holder.path()):
                locks[node] = locks.get(node, 0) + 1
        assert self.root.lock_count == locks.pop(self.root, 0), (
            "I3: the root's locks are the holders"
        )
        sizes = {True: 0, False: 0}
        for node in self.nodes():
            parent, size = node.parent, len(node.pages)
            assert parent and parent.children.get(self._key(node.tokens)) is node, "I3: the key"
            assert node.pages and len(node.tokens) == size * self.page_size, "I3: whole pages"
            assert node.end == parent.end + size, "I3: a node begins where its parent ends"
            held = locks.pop(node, 0)
            assert node.lock_count == held, f"I3: {held} hold a node locked {node.lock_count} times"
            assert node.in_heap or not self._is_evictable(node), "I5: a leaf cannot be evicted"
            sizes[node.lock_count > 0] += size
        assert not locks, "I3: a node that is locked has left the tree"
        assert sizes == {True: self.protected_size, False: self.evictable_size}, "I3: sizes"

    def _walk(self, token_ids: Sequence[int]) -> Iterator[tuple[TreeNode, int]]:
        """The nodes along a token list, each with the number of its pages that agree."""
        node, start, size = self.root, 0, self.page_size
        while child := node.children.get(self._key(token_ids[start : start + size])):
            ahead = token_ids[start : start + len(child.tokens)]
            common = common_pages(child.tokens, ahead, size)
            parted = common < len(child.pages)  # asked before the caller may split the child
            yield child, common
            if parted:
                return
            node, start = child, start + len(child.tokens)

    def _descend(self, token_ids: Sequence[int]) -> TreeNode:
        """Walk as far as the tokens lead, split where they part, and mark the way as used."""
        self._clock += 1
        node = self.root
        for child, common in self._walk(token_ids):
            node = child if common == len(child.pages) else self._split(child, common)
            node.last_used = self._clock
        return node

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        """Put a new node above, with the first `length` pages; returns it.

        Whoever holds `node` holds both: the new one has its locks, its hits and its time.
        """
        parent, cut = node.parent, length * self.page_size
        assert parent is not None and 0 < length < len(node.pages)
        upper = TreeNode(parent, node.tokens[:cut], node.pages[:length])
        upper.lock_count, upper.last_used, upper.hits = node.lock_count, node.last_used, node.hits
        parent.children[self._key(node.tokens)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[length:], upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _shorten(self, leaf: TreeNode, most: int) -> list[int]:
        """Cut at most so many pages off the end of a leaf; with the last one the leaf goes.

        Returns the pages. The tree's sizes are the caller's.
        """
        key, parent = self._key(leaf.tokens), leaf.parent
        assert parent is not None
        kept = max(0, len(leaf.pages) - most)
        taken = leaf.pages[kept:]
        del leaf.pages[kept:], leaf.tokens[kept * self.page_size :]
        leaf.end -= len(taken)
        if not leaf.pages:
            del parent.children[key]
            self._offer(parent)
        return taken

    def _is_evictable(self, node: TreeNode) -> bool:
        return bool(node.pages) and not node.children and node.lock_count == 0

    def _offer(self, node: TreeNode) -> None:
        """Enter a node for eviction if it is an unlocked leaf."""
        if self._is_evictable(node) and not node.in_heap:
            node.in_heap = True
            self._pushed += 1
            heapq.heappush(self._heap, (node.last_used, self._pushed, node))

    def _key(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the first page."""
        return tuple(token_ids[: self.page_size])


def common_pages(a: Sequence[int], b: Sequence[int], page_size: int) -> int:
    """How many whole pages two token lists have in common from their beginning.

    Both are lists, or both tuples: one never equals the other.
    """
    if a == b:
        return len(a) // page_size
    starts = range(0, min(len(a), len(b)) - page_size + 1, page_size)
    parted = (i for i in starts if a[i : i + page_size] != b[i : i + page_size])
    return next(parted, len(starts) * page_size) // page_size
