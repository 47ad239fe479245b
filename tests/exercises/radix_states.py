"""States of the radix tree and its rows, built by hand.

No exercise's code sets up the test of another: each test of the fourth rung's exercises begins in a
state that these few lines make, and calls what it is about.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import Request
from m4_radix.kv_cache import KVCacheManager
from m4_radix.radix_cache import RadixCache, TreeNode


def hang(
    tree: RadixCache, parent: TreeNode, tokens: Sequence[int], pages: Sequence[int], used: int = 0
) -> TreeNode:
    """Hang a node below another, as if it had been used last at that time of the tree's clock."""
    node = TreeNode(parent, list(tokens), list(pages))
    node.last_used = used
    parent.children[tuple(tokens[: tree.page_size])] = node
    tree.evictable_size += len(pages)
    tree._clock = max(tree._clock, used)
    return node


def lock_by_hand(tree: RadixCache, node: TreeNode) -> None:
    """What `lock` should do."""
    for held in (tree.root, *node.path()):
        if held.lock_count == 0 and held is not tree.root:
            tree.evictable_size -= len(held.pages)
            tree.protected_size += len(held.pages)
        held.lock_count += 1


def offer_leaves(tree: RadixCache) -> RadixCache:
    """The last touch to a tree built by hand: its unlocked leaves may be evicted."""
    for node in tree.nodes():
        tree._offer(node)
    return tree


def picture(tree: RadixCache) -> dict[str, str]:
    """The whole tree, for comparisons that a person can read: `{"1 2 / 3 4": "pages 9, locks 0"}`.

    The key is the path, its nodes apart; the value is what the last of them holds.
    """
    return {
        " / ".join(_words(n.tokens) for n in node.path()): (
            f"pages {_words(node.pages)}, locks {node.lock_count}"
        )
        for node in tree.nodes()
    }


def audit(tree: RadixCache, holders: Sequence[TreeNode], when: str) -> None:
    """The tree's own invariants, with the state and the last call in the message."""
    try:
        tree.check_invariants(holders)
    except AssertionError as broken:
        raise AssertionError(f"{when}: {broken}; the tree is {picture(tree)}") from None


def give_row(
    kv_cache: KVCacheManager, request: Request, num_computed: int, prefix: TreeNode | None = None
) -> list[int]:
    """Let a request run: a row that begins with a locked prefix, pages of its own after it.

    Returns the pages of the row.
    """
    tree = kv_cache.radix_cache
    prefix = prefix or tree.root
    row = request.row = kv_cache.free_rows.pop()
    lock_by_hand(tree, prefix)
    kv_cache.prefixes[row] = prefix
    own = kv_cache.allocator.allocate(kv_cache.pages_for(num_computed) - prefix.end)
    kv_cache.table.append(row, [*prefix.prefix_pages(), *own])
    kv_cache.table.take_updates()
    request.num_computed_tokens = num_computed
    return list(kv_cache.table.rows[row])


def cache_by_hand(
    kv_cache: KVCacheManager, tokens: Sequence[int], parent: TreeNode | None = None, used: int = 0
) -> TreeNode:
    """Pages that somebody computed and left in the tree: nobody reads them now."""
    pages = kv_cache.allocator.allocate(len(tokens) // kv_cache.page_size)
    tree = kv_cache.radix_cache
    node = hang(tree, parent or tree.root, tokens, pages, used)
    tree._offer(node)
    return node


def audit_pages(kv_cache: KVCacheManager, running: Sequence[Request], when: str) -> None:
    """I3 over rows, tree and free list, with the state and the last call in the message."""
    try:
        kv_cache.check_invariants(list(running))
    except AssertionError as broken:
        raise AssertionError(
            f"{when}: {broken}; rows {kv_cache.table.rows}, free pages "
            f"{sorted(kv_cache.allocator.free_pages)}, tree {picture(kv_cache.radix_cache)}"
        ) from None


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
