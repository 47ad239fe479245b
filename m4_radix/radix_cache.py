"""A radix tree of cached prefixes. Plain Python data, no tensors.

Each node stores a run of whole pages: their token ids and their page ids. The path from the root to
a node spells a prefix. Prefixes with the same beginning share nodes, and therefore pages.

    root ── "You are a tutor. " ─┬─ "What is a page?" ── " A page is ..."
            pages 7 2 9          │  pages 4 1            pages 8 3
                                 └─ "What is a tree?"
                                    pages 5 6

I3: the tree owns its pages. A request locks the prefix that it reads. Locked nodes are never
evicted; of the unlocked leaves, the least recently used one is evicted first (RadixAttention: Zheng
et al., NeurIPS 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class TreeNode:
    """A run of pages that follows the parent's pages.

    `pages[i]` holds the keys and values of `tokens[i * page_size:][:page_size]`.
    """

    def __init__(self, parent: TreeNode | None, tokens: list[int], pages: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[tuple[int, ...], TreeNode] = {}  # by the tokens of their first page
        # Pages from the root to the end of this node: the length of the prefix that it ends.
        self.num_prefix_pages: int = len(pages) + (parent.num_prefix_pages if parent else 0)
        self.lock_count = 0  # locks on this node and on its descendants
        self.last_used = 0  # on the tree's clock, which counts uses
        self.hits = 0  # prefixes that were matched through this node
        self.in_heap = False

    def path(self) -> list[TreeNode]:
        """Return the nodes from the root's child to this node."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix_pages(self) -> list[int]:
        """Return the pages of the whole prefix, in order of position."""
        return [page for node in self.path() for page in node.pages]


class CachedPrefix(NamedTuple):
    """The longest cached prefix of some tokens."""

    node: TreeNode  # the last node that holds a part of the prefix
    num_pages: int  # length of the prefix
    num_locked: int  # the number of its pages that are locked; they are the first ones


class RadixCache:
    """A tree of cached prefixes. Lengths and sizes are in pages. Only whole pages are cached."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = TreeNode(None, [], [])
        self.evictable_size = 0  # pages in unlocked nodes
        self.protected_size = 0  # pages in locked nodes
        self._clock = 0
        # Unlocked leaves as (last_used, number, node). An entry may be out of date: see `evict`.
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._pushed = 0

    def find(self, token_ids: Sequence[int]) -> CachedPrefix:
        """Return the longest cached prefix, without changing the tree."""
        node, num_pages = self.root, 0
        for child, common in self._walk(token_ids):
            node, num_pages = child, num_pages + common
        locked = node  # the ancestors of a locked node are locked: they come first on the path
        while locked.lock_count == 0 and locked.parent is not None:
            locked = locked.parent
        return CachedPrefix(node, num_pages, min(locked.num_prefix_pages, num_pages))

    def match_prefix(self, token_ids: Sequence[int]) -> TreeNode:
        """Return the node that ends the longest cached prefix of `token_ids`.

        If the prefix ends inside a node, split that node. The caller must lock the result before
        anything else can evict it.
        """
        node = self._descend(token_ids)
        for used in node.path():
            used.hits += 1
        return node

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> TreeNode:
        """Add a prefix of whole pages, and return the node that ends it.

        `pages[i]` holds the keys and values of `token_ids[i * page_size:][:page_size]`, which must
        be written. Where the tree already has a page of the same tokens, it keeps its own page:
        `node.prefix_pages()` are the pages that count. The tree takes the caller's other pages.
        """
        assert len(token_ids) == len(pages) * self.page_size, "I3: only whole pages are cached"
        node = self._descend(token_ids)
        if node.num_prefix_pages < len(pages):
            rest = list(token_ids[node.num_prefix_pages * self.page_size :])
            leaf = TreeNode(node, rest, list(pages[node.num_prefix_pages :]))
            leaf.last_used = self._clock
            node.children[self._key(rest)] = leaf
            self.evictable_size += len(leaf.pages)
            self._offer(leaf)
            node = leaf
        return node

    def lock(self, node: TreeNode) -> None:
        """Protect a prefix from eviction until `unlock`."""
        for locked in (self.root, *node.path()):
            if locked.lock_count == 0 and locked is not self.root:
                self.evictable_size -= len(locked.pages)
                self.protected_size += len(locked.pages)
            locked.lock_count += 1

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock` of the same node, even if nodes were split in the meantime."""
        for locked in (self.root, *node.path()):
            assert locked.lock_count > 0, "I3: unlock() called more often than lock() for this node"
            locked.lock_count -= 1
            if locked.lock_count == 0 and locked is not self.root:
                self.evictable_size += len(locked.pages)
                self.protected_size -= len(locked.pages)
        self._offer(node)

    def evict(self, num_pages: int) -> list[int]:
        """Remove `num_pages` pages from the ends of unlocked leaves, least recently used first.

        A leaf has at most one entry in the heap. If the leaf was used or locked after it entered,
        the entry is out of date: the leaf enters again with its new time, or not at all. Raises
        `AssertionError` (I3), and removes nothing, if fewer than `num_pages` are evictable.
        """
        assert num_pages <= self.evictable_size, f"I3: only {self.evictable_size} are evictable"
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
        """Iterate over all nodes except the root, parents first."""
        stack = [self.root]
        while stack:
            children = list(stack.pop().children.values())
            yield from children
            stack += children

    def check_invariants(self, holders: Iterable[TreeNode]) -> None:
        """Raise `AssertionError` on an error. `holders`: the node of each lock that is held."""
        locks: dict[TreeNode, int] = {}
        for holder in holders:
            for node in (self.root, *holder.path()):
                locks[node] = locks.get(node, 0) + 1
        assert self.root.lock_count == locks.pop(self.root, 0), (
            "I3: the root is locked once for each holder"
        )
        sizes = {True: 0, False: 0}
        for node in self.nodes():
            parent, size = node.parent, len(node.pages)
            assert parent and parent.children.get(self._key(node.tokens)) is node, "I3: the key"
            assert node.pages and len(node.tokens) == size * self.page_size, "I3: whole pages"
            assert node.num_prefix_pages == parent.num_prefix_pages + size, "I3: prefix length"
            held = locks.pop(node, 0)
            assert node.lock_count == held, f"I3: lock_count is {node.lock_count}, held: {held}"
            assert node.in_heap or not self._is_evictable(node), "I5: leaf is not in the heap"
            sizes[node.lock_count > 0] += size
        assert not locks, "I3: a locked node has left the tree"
        assert sizes == {True: self.protected_size, False: self.evictable_size}, "I3: sizes"

    def _walk(self, token_ids: Sequence[int]) -> Iterator[tuple[TreeNode, int]]:
        """Yield the nodes along a token list, each with the number of its pages that match."""
        node, start, size = self.root, 0, self.page_size
        while child := node.children.get(self._key(token_ids[start : start + size])):
            ahead = token_ids[start : start + len(child.tokens)]
            common = common_pages(child.tokens, ahead, size)
            ends_inside = common < len(child.pages)  # computed before the caller splits the child
            yield child, common
            if ends_inside:
                return
            node, start = child, start + len(child.tokens)

    def _descend(self, token_ids: Sequence[int]) -> TreeNode:
        """Walk the longest match, mark it as used, and split a node where the match ends inside."""
        self._clock += 1
        node = self.root
        for child, common in self._walk(token_ids):
            node = child if common == len(child.pages) else self._split(child, common)
            node.last_used = self._clock
        return node

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        """Insert a new parent that takes the first `length` pages of `node`. Return the parent.

        The new parent inherits the lock count, the hits and the time of `node`: each lock on `node`
        also protects its ancestors.
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
        """Remove up to `most` pages from the end of a leaf. Return the pages.

        The leaf itself is removed when no page is left. The caller updates the tree's sizes.
        """
        key, parent = self._key(leaf.tokens), leaf.parent
        assert parent is not None
        kept = max(0, len(leaf.pages) - most)
        taken = leaf.pages[kept:]
        del leaf.pages[kept:], leaf.tokens[kept * self.page_size :]
        leaf.num_prefix_pages -= len(taken)
        if not leaf.pages:
            del parent.children[key]
            self._offer(parent)
        return taken

    def _is_evictable(self, node: TreeNode) -> bool:
        return bool(node.pages) and not node.children and node.lock_count == 0

    def _offer(self, node: TreeNode) -> None:
        """Enter a node into the eviction heap if it is an unlocked leaf."""
        if self._is_evictable(node) and not node.in_heap:
            node.in_heap = True
            self._pushed += 1
            heapq.heappush(self._heap, (node.last_used, self._pushed, node))

    def _key(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the first page: the key of a child in its parent."""
        return tuple(token_ids[: self.page_size])


def common_pages(a: Sequence[int], b: Sequence[int], page_size: int) -> int:
    """Return the number of whole pages that two token lists share, counted from the start.

    Both must be lists, or both tuples: a list never equals a tuple.
    """
    if a == b:
        return len(a) // page_size
    starts = range(0, min(len(a), len(b)) - page_size + 1, page_size)
    different = (i for i in starts if a[i : i + page_size] != b[i : i + page_size])
    return next(different, len(starts) * page_size) // page_size
