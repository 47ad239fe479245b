"""hybrid_memory.1: a group with a window gives back the pages that no coming query sees."""

from __future__ import annotations

import pytest

from milestones.electives.hybrid_memory.hybrid_kv_cache import HybridPageTable
from milestones.electives.hybrid_memory.kv_groups import (
    BlockAllocator,
    KVCacheGroupSpec,
    WindowPages,
)

PAGE_SIZE, WINDOW, NUM_PAGES = 4, 8, 40


def make_table(*windows: int, has_full: bool = True) -> HybridPageTable:
    """Return a table of two rows for full attention and a group with each of the windows."""
    groups = [KVCacheGroupSpec((0,) if has_full else ())]
    groups += [KVCacheGroupSpec((1,), window) for window in windows or (WINDOW,)]
    return HybridPageTable(2, BlockAllocator(NUM_PAGES, PAGE_SIZE, groups))


def add_blocks(table: HybridPageTable, count: int, row: int = 0) -> list[int]:
    """Append new blocks to a row. Return them."""
    blocks = table.allocator.allocate(count)
    table.append(row, blocks)
    table.take_updates()
    return blocks


def held(table: HybridPageTable, row: int = 0, number: int = 0) -> list[bool]:
    """Return for each block of a row whether it has a page in a group with a window."""
    return [page != 0 for page in table.pages[number][row]]


@pytest.mark.parametrize(
    ("size", "num_tokens", "first"),
    [
        *((WINDOW, n, b) for n, b in ((0, 0), (7, 0), (10, 0), (11, 1), (14, 1), (15, 2), (19, 3))),
        *((size, 12, b) for size, b in ((1, 3), (2, 2), (5, 2), (6, 1), (100, 0))),
    ],
)
def test_the_first_block_that_a_query_sees(size: int, num_tokens: int, first: int) -> None:
    window = WindowPages(size, PAGE_SIZE)
    assert window.first_block(num_tokens) == first, (
        f"the query at position {num_tokens} sees the last {size} tokens, its own one included"
    )


def test_a_page_is_free_when_no_query_sees_it() -> None:
    table = make_table()
    add_blocks(table, 3)
    before = len(table.allocator.free_pages)
    table.slide(0, 10, 0)
    assert held(table) == [True, True, True], "the query at position 10 sees position 3"
    table.slide(0, 11, 0)
    assert held(table) == [False, True, True], "the query at position 11 does not"
    assert len(table.allocator.free_pages) == before + 1, "I3: one page is free again"


def test_a_page_is_freed_once() -> None:
    table = make_table()
    blocks = add_blocks(table, 4)
    before = len(table.allocator.free_pages)
    for num_tokens in (11, 12, 15, 15, 16):
        table.slide(0, num_tokens, 0)
    assert len(table.allocator.free_pages) == before + 2, "I3: two blocks are behind the window"
    assert held(table) == [False, False, True, True], "the blocks of the window stay"
    assert table.rows[0] == blocks, "the row of full attention does not change"
    assert not set(blocks) & set(table.allocator.free_pages), "its pages are not free"


def test_each_group_has_its_own_window() -> None:
    table = make_table(8, 3)
    add_blocks(table, 3)
    table.slide(0, 11, 0)
    assert held(table, number=0) == [False, True, True], "a window of 8 sees 4 to 11"
    assert held(table, number=1) == [False, False, True], "a window of 3 sees 9 to 11"


def test_the_device_gets_the_padding_page() -> None:
    table = make_table()
    add_blocks(table, 3, row=1)
    table.slide(1, 11, 0)
    assert table.take_updates() == [(3, 0, 0)], "row 1 of the group with a window is row 2 + 1"


def test_a_page_that_the_tree_has_stays() -> None:
    table = make_table()
    blocks, window = add_blocks(table, 3), table.allocator.windows[0]
    before = list(table.allocator.free_pages)
    table.slide(0, 11, 1)
    assert table.allocator.free_pages == before, "I3: the tree has the first block"
    assert held(table) == [False, True, True], "the request does not use it any more"
    assert blocks[0] in window.pages and blocks[0] not in window.uses, "the tree may drop it"


def test_a_page_that_another_request_uses_stays() -> None:
    table = make_table()
    blocks, window = add_blocks(table, 3), table.allocator.windows[0]
    table.append(1, blocks[:1])
    before = list(table.allocator.free_pages)
    table.slide(0, 11, 0)
    assert table.allocator.free_pages == before, "I3: row 1 still sees it: its last use is to come"
    assert window.uses[blocks[0]] == 1, "one request of two has released it"


def test_a_model_with_windows_only() -> None:
    table = make_table(has_full=False)
    add_blocks(table, 3)
    assert len(table.allocator.free_pages) == NUM_PAGES - 3, "a block takes one page"
    table.slide(0, 19, 0)
    assert held(table) == [False, False, False], "the query at position 19 sees 12 to 19"
    assert len(table.allocator.free_pages) == NUM_PAGES, "I3: no page is held"
