"""Groups of layers that keep the same tokens, and the blocks that have a page in each group.

All groups take their pages from one pool. Therefore a page of each group must take the same memory,
and no group has more layers than there are layers with full attention.

    model     F W W W F W W W          F full attention, W sliding window
    groups    0 1 1 2 0 2 3 3          group 0: full attention; groups 1 to 3: windows

Plain Python data, no tensors. The groups are those of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .kv_cache import PageAllocator
from .state_slots import StateSlots

if TYPE_CHECKING:
    from common.hf.support import LayerKV


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """The layers of a group, and what they keep of a request.

    Keys and values of all tokens; or of the last `window` tokens; or, with `num_snapshots`, a
    recurrent state instead of keys and values.
    """

    layers: tuple[int, ...]
    window: int | None = None
    num_snapshots: int | None = None  # copies of states that the prefix cache can keep


Groups = Sequence[KVCacheGroupSpec]
# The first group has full attention. In a model with windows only, it has no layers.
FULL_ATTENTION: Groups = (KVCacheGroupSpec(layers=(0,)),)


def make_groups(layers: Sequence[LayerKV], max_model_len: int) -> list[KVCacheGroupSpec]:
    """Return the groups of a model. A window that no request can exceed is full attention."""
    kinds: dict[int | None, list[int]] = {None: []}
    for index, layer in enumerate(layers):
        window = layer.window if (layer.window or max_model_len) < max_model_len else None
        kinds.setdefault(window, []).append(index)
    size = len(kinds[None]) or min(len(members) for members in kinds.values() if members)
    groups = [KVCacheGroupSpec(tuple(kinds.pop(None)))]
    for window, members in kinds.items():
        for start in range(0, len(members), size):
            groups.append(KVCacheGroupSpec(tuple(members[start : start + size]), window))
    return groups


class WindowPages:
    """The pages of a group with a sliding window, by block.

    A page is *in use* while it is in the window of a running request. A page that is not in use
    belongs to the tree, which may drop it.
    """

    def __init__(self, window: int, page_size: int) -> None:
        self.window = window  # tokens
        self.page_size = page_size
        self.pages: dict[int, int] = {}  # of the blocks that have a page in this group
        self.uses: Counter[int] = Counter()  # by how many requests, of the blocks in use

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the first block that the query after `num_tokens` tokens sees.

        The query at position p sees p itself and the `window - 1` positions before it.
        """
        return max(0, num_tokens - self.window + 1) // self.page_size

    def most_blocks(self, num_queries: int) -> int:
        """Return the largest number of blocks that adjacent queries can see.

        They see their own tokens and `window - 1` before them, which begin anywhere in a block.
        """
        return (self.window + num_queries - 3) // self.page_size + 2

    def use(self, block: int) -> int:
        """Note that a block is in the window of one more request. Return its page."""
        self.uses[block] += 1
        return self.pages[block]

    def release(self, block: int) -> bool:
        """Undo one `use`. Return whether it was the last one. The block keeps its page."""
        self.uses[block] -= 1
        if not self.uses[block]:
            del self.uses[block]
        return block not in self.uses


class BlockAllocator(PageAllocator):
    """The free pages. A block is `page_size` tokens of a prefix, with a page in each group.

    The number of a block is its page of full attention. In a model without full attention it is a
    number that stands for no memory. In a group with a window, a block can lose its page and stay.
    """

    def __init__(self, num_pages: int, page_size: int, groups: Groups) -> None:
        super().__init__(num_pages)
        self.page_size = page_size
        self.has_full = bool(groups[0].layers)
        self.windows = [WindowPages(g.window, page_size) for g in groups if g.window is not None]
        counts = [g.num_snapshots for g in groups if g.num_snapshots is not None]
        self.states = [StateSlots(count, page_size) for count in counts]  # one, or none
        self._numbers = PageAllocator(0)  # of blocks without a page of full attention

    @property
    def pages_per_block(self) -> int:
        """Pages that a new block takes: one in each group."""
        return self.has_full + len(self.windows)

    def most_pages(self, num_tokens: int, chunk: int) -> int:
        """Return the largest number of pages that a request with `num_tokens` tokens needs.

        It computes at most `chunk` tokens in a step.
        """
        blocks = -(-num_tokens // self.page_size)
        in_windows = sum(min(blocks, window.most_blocks(chunk)) for window in self.windows)
        return blocks * self.has_full + in_windows

    def max_tokens(self, max_model_len: int) -> int:
        """Return the length up to which a request that runs alone fits the pool."""
        blocks = max(self.num_pages, -(-max_model_len // self.page_size))
        while self.most_pages(blocks * self.page_size, chunk=1) > self.num_pages:
            blocks -= 1
        return blocks * self.page_size

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with a page in each group."""
        numbers = self._numbers
        if not self.has_full and count > len(numbers.free_pages):
            numbers.free_pages += range(numbers.num_pages + 1, numbers.num_pages + 1 + count)
            numbers.num_pages += count
        blocks = super().allocate(count) if self.has_full else numbers.allocate(count)
        for window in self.windows:
            window.pages.update(zip(blocks, super().allocate(count), strict=True))
        return blocks

    def free(self, pages: Sequence[int]) -> None:
        """Give blocks back, with their pages in all groups. No request uses them."""
        PageAllocator.free(self if self.has_full else self._numbers, pages)
        for window in self.windows:
            for block in pages:
                self.drop(window, block)
        for states in self.states:
            for block in pages:
                states.drop(block)

    def drop(self, window: WindowPages, block: int) -> None:
        """Give back the page of a block in one group, if it has one."""
        assert block not in window.uses, f"I3: block {block} is freed, and a request uses it"
        if block in window.pages:
            self.free_pages.append(window.pages.pop(block))
