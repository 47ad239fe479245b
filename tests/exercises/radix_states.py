"""States of the radix tree and its rows, built by hand.

The code of one exercise never sets up the test of another. Each test of the fourth milestone's
exercises begins in a state that these functions build, and calls only the code that it tests.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import Request
from m4_radix.kv_cache import KVCacheManager
from m4_radix.radix_cache import RadixCache, TreeNode


def hang(
    tree: RadixCache, parent: TreeNode, tokens: Sequence[int], pages: Sequence[int], used: int = 0
) -> TreeNode:
    """Add a node below another one, as if it was last used at time `used` of the tree's clock."""
    node = TreeNode(parent, list(tokens), list(pages))
    node.last_used = used
    parent.children[tuple(tokens[: tree.page_size])] = node
    tree.evictable_size += len(pages)
    tree._clock = max(tree._clock, used)
    return node


def lock_by_hand(tree: RadixCache, node: TreeNode) -> None:
    """Do what `lock` should do."""
    for held in (tree.root, *node.path()):
        if held.lock_count == 0 and held is not tree.root:
            tree.evictable_size -= len(held.pages)
            tree.protected_size += len(held.pages)
        held.lock_count += 1


def offer_leaves(tree: RadixCache) -> RadixCache:
    """Offer the unlocked leaves of a tree for eviction, as the last step of building it by hand."""
    for node in tree.nodes():
        tree._offer(node)
    return tree


def picture(tree: RadixCache) -> dict[str, str]:
    """Return the tree in a form that a person can read: `{"1 2": "pages 9", "1 2 / 3": "pages 4"}`.

    A key is a path, with `/` between its nodes. The value describes the last node of the path, with
    its locks if it has any.
    """
    return {
        " / ".join(_words(part.tokens) for part in node.path()): f"pages {_words(node.pages)}"
        + (f", locks {node.lock_count}" if node.lock_count else "")
        for node in tree.nodes()
    }


def audit(tree: RadixCache, holders: Sequence[TreeNode], when: str) -> None:
    """Check the tree's own invariants; the message of a failure has the last call and the tree."""
    entries = [node for _last_used, _number, node in tree._heap]
    try:
        tree.check_invariants(holders)
        for node in tree.nodes():
            assert entries.count(node) == node.in_heap, (
                f"I5: in_heap is {node.in_heap} for {_words(node.tokens)}, and the heap has "
                f"{entries.count(node)} entries of it"
            )
    except AssertionError as broken:
        raise AssertionError(f"{when}: {broken}; the tree is {picture(tree)}") from None


def manager(num_pages: int = 8, page_size: int = 4) -> KVCacheManager:
    """Return a memory of three rows, without requests and with an empty tree."""
    return KVCacheManager(num_rows=3, num_pages=num_pages, page_size=page_size)


def give_row(
    kv_cache: KVCacheManager, request: Request, num_computed: int, prefix: TreeNode | None = None
) -> list[int]:
    """Give a request a row that begins with a locked prefix, followed by pages of its own.

    Return the pages of the row.
    """
    tree = kv_cache.radix_cache
    prefix = prefix or tree.root
    row = request.row = kv_cache.free_rows.pop()
    lock_by_hand(tree, prefix)
    kv_cache.last_nodes[row] = prefix
    own = kv_cache.allocator.allocate(kv_cache.pages_for(num_computed) - prefix.num_prefix_pages)
    kv_cache.table.append(row, [*prefix.prefix_pages(), *own])
    kv_cache.table.take_updates()
    request.num_computed_tokens = num_computed
    return list(kv_cache.table.rows[row])


def cache_by_hand(
    kv_cache: KVCacheManager, tokens: Sequence[int], parent: TreeNode | None = None, used: int = 0
) -> TreeNode:
    """Add pages to the tree that an earlier request computed and that no request reads now."""
    pages = kv_cache.allocator.allocate(len(tokens) // kv_cache.page_size)
    tree = kv_cache.radix_cache
    node = hang(tree, parent or tree.root, tokens, pages, used)
    tree._offer(node)
    return node


def audit_pages(kv_cache: KVCacheManager, running: Sequence[Request], when: str) -> None:
    """Check I3 over rows, tree and free list; a failure shows the last call and the state."""
    try:
        kv_cache.check_invariants(list(running))
    except AssertionError as broken:
        raise AssertionError(
            f"{when}: {broken}; rows {kv_cache.table.rows}, free pages "
            f"{sorted(kv_cache.allocator.free_pages)}, tree {picture(kv_cache.radix_cache)}"
        ) from None


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
