"""The questions of m4: the tree, its locks, eviction, rows with a prefix, and the order of joining.

Page ids are answers only where no allocation has chosen them.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from m4_radix import scheduler as scheduler_module
from m4_radix.admission import LEAST_SHARED_PAGES
from m4_radix.kv_cache import KVCacheManager
from m4_radix.radix_cache import RadixCache, TreeNode
from tests.exercises.by_hand import make_request
from tests.exercises.radix_states import (
    cache_by_hand,
    give_row,
    hang,
    lock_by_hand,
    offer_leaves,
    picture,
)
from tests.exercises.test_m4_6 import branches, ordered, overtake, queue, scheduler_of
from tests.helpers.fake_paged import FakePagedEngine

Asked = Iterator[tuple[str, str, Any]]


def random_tree(chance: Random) -> tuple[RadixCache, list[TreeNode], TreeNode | None]:
    """Return a tree with branches of different ages, its nodes, and the node of its only lock."""
    size = chance.choice([1, 1, 2, 3])
    tree = RadixCache(size)
    ages, page = chance.sample(range(1, 60), 12), iter(chance.sample(range(1, 200), 100))
    nodes = [tree.root]
    for first in chance.sample(range(10), chance.randint(2, 6)):
        # Nodes are never younger than their parents, as in a tree that was used.
        parent = chance.choice(nodes)
        length = chance.randint(1, 4)
        tokens = [first, *(chance.randrange(3) for _ in range(length * size - 1))]
        pages = [next(page) for _ in range(length)]
        nodes.append(hang(tree, parent, tokens, pages, used=ages.pop()))
    for node in reversed(nodes[1:]):
        if node.parent is not None and node.parent is not tree.root:
            node.parent.last_used = max(node.parent.last_used, node.last_used)
    lock = len(tree.root.children) > 1 and chance.random() < 0.7  # something stays evictable
    held = chance.choice(nodes[1:]) if lock else None
    if held is not None:
        lock_by_hand(tree, held)
    return offer_leaves(tree), nodes[1:], held


def near(chance: Random, nodes: list[TreeNode], size: int) -> list[int]:
    """Return tokens that begin like the path of a node, for a random length, and go on freely."""
    tokens = [token for node in chance.choice(nodes).path() for token in node.tokens]
    if chance.random() < 0.4:  # they part in the middle, and the rest is alike again
        tokens[chance.randrange(len(tokens))] = 99
        return tokens
    tokens = tokens[: chance.randint(0, len(tokens))]
    return [*tokens, *(chance.randrange(3) for _ in range(chance.randint(0, 2 * size)))]


def match(chance: Random) -> Asked:
    tree, nodes, _held = random_tree(chance)
    for _ in range(5):
        tokens, before = near(chance, nodes, tree.page_size), picture(tree)
        found = tree.find(tokens)
        node = tree.match_prefix(tokens)
        about = f"match_prefix({tokens}), page_size={tree.page_size}, in {before}"
        pages = [node.prefix_pages(), node.num_prefix_pages]
        yield "prefixes, and the tree", about, [found.num_pages, found.num_locked, *pages]
        yield "prefixes, and the tree", about, picture(tree)
        prefixes = [len(handle.prefix_pages()) for handle in nodes]
        yield "nodes that requests hold", about, prefixes
    # The tokens part in the middle of a node, and go on like the first page of its children.
    tree, half = RadixCache(1), chance.randint(1, 4)
    numbers = chance.sample(range(50), 2 * half + 2)
    upper = hang(tree, tree.root, numbers[: 2 * half], list(range(1, 2 * half + 1)))
    for page, token in enumerate(numbers[2 * half :], start=20):
        hang(tree, upper, [token], [page])
    tokens = [*numbers[:half], *chance.sample(numbers[2 * half :], 2)]
    about, node = f"match_prefix({tokens}) in {picture(tree)}", tree.match_prefix(tokens)
    yield "prefixes, and the tree", about, [node.prefix_pages(), picture(tree)]


def insertion(chance: Random) -> Asked:
    tree, nodes, first = random_tree(chance)
    held: list[TreeNode] = [first] if first else []
    new = iter(range(1000, 2000))
    for _ in range(6):
        before = picture(tree)
        if held and chance.random() < 0.4:
            what = "unlock"
            tree.unlock(held.pop(chance.randrange(len(held))))
        elif chance.random() < 0.5:
            tokens = near(chance, nodes, tree.page_size)
            tokens = tokens[: len(tokens) // tree.page_size * tree.page_size]
            pages = [next(new) for _ in range(len(tokens) // tree.page_size)]
            node = tree.insert(tokens, pages)
            what = f"insert({tokens}, {pages})"
            yield "the pages of a new node", what, node.prefix_pages()
            if node is not tree.root:
                nodes.append(node)
        else:
            held.append(chance.choice(nodes))
            what = f"lock of {held[-1].prefix_pages()}"
            tree.lock(held[-1])
        tree.check_invariants(held)
        sizes = [tree.evictable_size, tree.protected_size, tree.root.lock_count]
        about = f"{what}, page_size={tree.page_size}, in {before}"
        yield "the tree", about, picture(tree)
        yield "evictable and protected pages", about, sizes


def eviction(chance: Random) -> Asked:
    tree, nodes, held = random_tree(chance)
    if held is None and len(tree.root.children) > 1:
        lock_by_hand(tree, chance.choice(nodes))  # locked after it was offered
    leaves = [node for node in nodes if not node.children and not node.lock_count]
    if leaves and chance.random() < 0.5:
        chance.choice(leaves).last_used = 100  # used since it was offered
    ages = {node.pages[-1]: node.last_used for node in nodes}
    yield "the pages that go", "evict(0)", tree.evict(0)
    while tree.evictable_size:
        most = chance.randint(1, min(4, tree.evictable_size))
        before = picture(tree)
        taken = tree.evict(most)
        about = f"evict({most}) in {before}; last_used by last page: {ages}"
        yield "the pages that go", about, sorted(taken)
        yield "the tree that stays", about, [picture(tree), tree.evictable_size]


def shape(kv_cache: KVCacheManager) -> list[Any]:
    """Return the tree with numbers of pages, and not their ids."""
    tree = kv_cache.radix_cache
    nodes = {
        " ".join(str(t) for part in node.path() for t in part.tokens): [
            len(node.pages), node.lock_count,
        ]
        for node in tree.nodes()
    }  # fmt: skip
    return [nodes, tree.evictable_size, tree.protected_size, kv_cache.num_free_pages]


def rows(chance: Random) -> Asked:
    size = chance.choice([1, 2, 4])
    kv_cache = KVCacheManager(num_rows=3, num_pages=30, page_size=size)
    stem = [chance.randrange(50) for _ in range(size * chance.randint(1, 6))]
    cached = cache_by_hand(kv_cache, stem, used=1)
    if chance.random() < 0.5:
        cache_by_hand(kv_cache, [60] * size * 3, used=2)
    requests = []
    for name in "abc":
        cut = chance.randint(0, len(stem))
        tokens = [*stem[:cut], *(chance.randrange(50, 59) for _ in range(chance.randint(0, 6)))]
        request = make_request(name, tokens or [50])
        kv_cache.allocate(request)
        requests.append(request)
        begins = kv_cache.pages_of(request) == cached.prefix_pages()[: len(
            kv_cache.pages_of(request)
        )]  # fmt: skip
        about = f"allocate({tokens}) with {stem} cached, page_size={size}"
        held = len(kv_cache.pages_of(request))
        yield "a row with a prefix", about, [request.num_computed_tokens, held, begins]
        yield "the tree after a match", about, shape(kv_cache)
    for request in requests:
        num_tokens = chance.randint(1, 9 * size)
        kv_cache.allocate_slots(request, num_tokens)
        about = f"allocate_slots(request, {num_tokens}), page_size={size}"
        pages = kv_cache.pages_of(request)
        found = [len(pages), len(set(pages)), shape(kv_cache)]
        yield "pages for a step, and the tree", about, found


def sharing(chance: Random) -> Asked:
    size = chance.choice([1, 2, 4])
    kv_cache = KVCacheManager(num_rows=3, num_pages=40, page_size=size)
    stem = [chance.randrange(4) for _ in range(3 * size)]
    prefix = cache_by_hand(kv_cache, stem) if chance.random() < 0.5 else None
    requests, about = [], []
    for name in "abc":
        tail = [chance.randrange(2) for _ in range(chance.randint(1, 3 * size))]
        request = make_request(name, [*stem, *tail])
        begin = len(stem) if prefix else 0
        give_row(kv_cache, request, chance.randint(begin, request.num_tokens - 1), prefix)
        requests.append(request)
        about.append(f"{request.token_ids}, {request.num_computed_tokens} computed")
    device = {
        (row, column): page
        for row, pages in enumerate(kv_cache.table.rows)
        for column, page in enumerate(pages)
    }
    for _ in range(5):
        request = chance.choice(requests)
        if request.row is None:
            continue
        if chance.random() < 0.6:
            kv_cache.insert(request)
            what = f"insert of request {request.request_id}"
            yield "tokens in the tree", f"after {what}", kv_cache.num_inserted_tokens(request)
        else:
            kv_cache.free(request)
            what = f"free of request {request.request_id}"
        device |= {(row, column): page for row, column, page in kv_cache.table.take_updates()}
        held = [kv_cache.pages_of(r) for r in requests if r.row is not None]
        seen = [
            [device.get((r.row, column)) for column in range(len(kv_cache.pages_of(r)))]
            for r in requests
            if r.row is not None
        ]
        free = sorted(kv_cache.allocator.free_pages)
        state = f"{what}; page_size={size}; {about}"
        yield "the tree", state, picture(kv_cache.radix_cache)
        yield "the rows", state, held
        yield "the rows on the device", state, seen
        yield "the free pages", state, free


def joining(chance: Random) -> Asked:
    scheduler = scheduler_of("dfs-weight")
    sizes = chance.sample(range(1, 7), 4)
    branches(scheduler, sizes)
    queue(scheduler, {"stem": [chance.randint(1, 4), 99], "cold": [98, 99]})
    yield "dfs-weight", f"branches of {sizes} requests", ordered(scheduler)
    policy = chance.choice(["lpm", "lof", "fcfs"])
    scheduler = scheduler_of(policy)
    stem = [chance.randrange(5) for _ in range(8)]
    cache_by_hand(scheduler.kv_cache, stem)
    for i in range(6):
        cut = chance.randint(0, 8)
        queue(scheduler, {f"{i}": [*stem[:cut], 9, 9]}, max_tokens=chance.randint(1, 30))
        overtake(scheduler, chance.choice([0, 5, 20]))
    yield "lpm, lof and fcfs", f"{policy} with {stem} cached", ordered(scheduler)
    running = make_request("running", [chance.randrange(3) for _ in range(chance.randint(4, 9))])
    give_row(scheduler.kv_cache, running, 0)
    scheduler.running.append(running)
    least = LEAST_SHARED_PAGES * scheduler.kv_cache.page_size
    for cut in (least, *(chance.randint(0, running.num_tokens) for _ in range(3))):
        request = make_request(
            "new", [*running.token_ids[:cut], *[7] * chance.randint(0, 2)] or [7]
        )
        scheduler.policy.on_arrival(request, 0)
        waits = scheduler.admission.waits_for_prefix(request, scheduler.running)
        about = f"waits_for_prefix({request.token_ids}) beside {running.token_ids}"
        yield "waiting for a prefix", about, waits
    engine = FakePagedEngine(scheduler_module, 60, page_size=2, max_num_seqs=3)
    for i in range(5):
        tokens = [*stem[: chance.randint(0, 8)], *(chance.randrange(9) for _ in range(3))]
        engine.add(f"{i}", tokens, chance.randint(1, 6))
    while engine.live:
        batch = engine.step()
        names = [request.request_id for request in batch.requests]
        counts = list(batch.num_scheduled_tokens)
        yield "steps of the engine", f"{stem} is shared", [names, counts]


QUESTIONS = {
    "m4.1": (match, 40), "m4.2": (insertion, 60), "m4.3": (eviction, 80), "m4.4": (rows, 60),
    "m4.5": (sharing, 80), "m4.6": (joining, 36),
}  # fmt: skip
