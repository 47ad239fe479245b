"""The questions of hybrid_memory: random windows over random rows, prefixes with gaps, states."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.exercises.test_hybrid_memory_1 import add_blocks, held, make_table
from tests.exercises.test_hybrid_memory_2 import PAGE_SIZE, cached, found, lose, make_cache
from tests.exercises.test_hybrid_memory_3 import ROW, advance, make_slots

Asked = Iterator[tuple[str, str, Any]]


def windows(chance: Random) -> Asked:
    """Two rows move on at random. Some of their blocks are shared, and the tree has some."""
    sizes = [chance.randint(1, 14) for _ in range(chance.randint(1, 3))]
    table = make_table(*sizes, has_full=chance.random() < 0.6)
    blocks, shared = add_blocks(table, 5), chance.randint(0, 3)
    table.append(1, blocks[:shared])
    add_blocks(table, 2, row=1)
    at, num_cached = [0, 0], chance.randint(shared, 4)
    for _ in range(6):
        row = chance.randrange(2)
        at[row] = min(len(table.rows[row]) * PAGE_SIZE, at[row] + chance.randint(0, 7))
        table.slide(row, at[row], num_cached if row == 0 else shared)
        about = f"windows {sizes}, rows at {at}, {num_cached} blocks in the tree, {shared} shared"
        pages = [held(table, row, number) for number in range(len(sizes)) for row in (0, 1)]
        yield "pages", about, [pages, sorted(table.allocator.free_pages)]
        uses = [sorted(window.uses.items()) for window in table.allocator.windows]
        yield "uses of a page", about, uses


def branches(chance: Random) -> Asked:
    """A leaf loses all its pages, and so do the last blocks of its parent."""
    cache, tokens = make_cache(), [chance.randrange(50) for _ in range(6 * PAGE_SIZE)]
    inner, kept = chance.randint(2, 4), chance.randint(0, 1)
    cached(cache, tokens[: inner * PAGE_SIZE])
    blocks = cached(cache, tokens)
    lose(cache, *blocks[kept:])
    leaf = max(cache.nodes(), key=lambda node: node.num_prefix_pages)
    about = f"{inner} blocks and a branch, pages in the first {kept}"
    trimmed = [sorted(cache.trim(leaf)), cache.evictable_size, len(list(cache.nodes()))]
    yield "trimmed branches", about, trimmed


def prefixes(chance: Random) -> Asked:
    """Lose the pages of random blocks, look for prefixes, and trim the leaf."""
    yield from branches(chance)
    sizes = [chance.randint(1, 12) for _ in range(chance.randint(1, 2))]
    cache, tokens = make_cache(*sizes), [chance.randrange(50) for _ in range(6 * PAGE_SIZE)]
    blocks = cached(cache, tokens)
    for number in range(len(sizes)):
        lose(cache, *chance.sample(blocks, chance.randint(0, 4)), number=number)
    lost = [[b in window.pages for b in blocks] for window in cache.windows]
    about = f"windows {sizes}, blocks with pages {lost}"
    yield "where a request resumes", about, [cache.resumable(blocks[:n]) for n in range(7)]
    prefixes = [found(cache, tokens[: count * PAGE_SIZE]) for count in (3, 6)]
    yield "prefixes that are found", about, prefixes
    leaf = max(cache.nodes(), key=lambda node: node.num_prefix_pages)
    trimmed = [sorted(cache.trim(leaf)), cache.evictable_size]
    yield "trimmed branches", about, trimmed


def chunks(chance: Random, num_tokens: int, budget: int) -> Asked:
    """A prompt is computed in chunks, and its states are kept while there are slots."""
    known, num_snapshots = chance.randint(0, 4), chance.randint(0, 4)
    slots, request = make_slots(num_tokens, known, num_snapshots)
    about = f"{num_tokens} tokens, {known} blocks are known, {num_snapshots} slots, budget {budget}"
    while (before := request.num_computed_tokens) < num_tokens:
        end = slots.chunk_end(request, min(num_tokens, before + budget))
        yield "the end of a chunk", f"{about}, computed {before}", end
        advance(slots, request, end := max(before + 1, end), block=end)
        kept = [sorted(slots.pages), slots.saves, slots.lengths[ROW]]
        yield "states that are kept", f"{about}, computed {end}", kept


def states(chance: Random) -> Asked:
    """A prompt of whole blocks in one step or two, and any prompt in more steps."""
    yield from chunks(chance, PAGE_SIZE * chance.randint(2, 9), chance.randint(20, 40))
    yield from chunks(chance, chance.randint(2, 40), chance.randint(1, 20))


QUESTIONS = {
    "hybrid_memory.1": (windows, 100), "hybrid_memory.2": (prefixes, 100),
    "hybrid_memory.3": (states, 100),
}  # fmt: skip
