"""`StateSlots`: a group of layers with recurrent states instead of keys and values. No tensors.

A state stands for all tokens up to its position, and cannot be cut back to fewer. A running request
has one, in the slot of its row, and each step replaces it by the next one. The prefix cache has
*snapshots*: copies of states at the ends of blocks. A request can resume only where there is one.

    prompt   | block 0 | block 1 | block 2 | bl        blocks of 4 tokens, 14 tokens
    chunks   |-------------------|---------|--|        a chunk ends where the tree branches off, and
    snapshots                    2         5           at the last end of a block

The device copies states before and after a step, in the order of the steps. Therefore a slot is
free as soon as the last step that copies it is planned. SGLang does the same (Mamba radix cache).
"""

from __future__ import annotations

from collections.abc import Sequence

from common import Request

Loads = list[tuple[int, int | None]]  # (row, snapshot; None: the state of no token), before a step
Saves = list[tuple[int, int]]  # (row, snapshot), after a step


class StateSlots:
    """The states of rows, and the snapshots of blocks: `pages`, as `WindowPages` has them."""

    def __init__(self, num_snapshots: int, page_size: int) -> None:
        self.num_snapshots = num_snapshots
        self.page_size = page_size
        self.pages: dict[int, int] = {}  # the snapshots of the blocks that have one
        self.free_slots = list(range(num_snapshots - 1, -1, -1))
        self.lengths: dict[int, int] = {}  # by row: tokens of its state, with planned steps
        self.branches: dict[int, int] = {}  # by row: tokens that the tree knew at its start
        self.loads: Loads = []  # of the next step that is launched
        self.saves: Saves = []

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the last block that ends within the first `num_tokens` tokens.

        A request that has computed that many tokens needs no snapshot before this block.
        """
        return max(0, num_tokens // self.page_size - 1)

    def start(self, request: Request, prefix: Sequence[int], num_known: int) -> None:
        """Let the state of a row begin as a copy of the snapshot of its cached prefix, in blocks.

        num_known: length of the prefix that the tree knows, in blocks, also without a snapshot.
        """
        assert request.row is not None, f"I3: {request} has no row"
        self.loads.append((request.row, self.pages[prefix[-1]] if prefix else None))
        self.lengths[request.row] = len(prefix) * self.page_size
        self.branches[request.row] = num_known * self.page_size

    def chunk_end(self, request: Request, end: int) -> int:
        """Return where a chunk that could go to `end` must end, so that others can resume there.

        It ends where the tree branches off, or else at the last end of a block, but before the last
        token of the prompt: the same prompt must compute that token again.
        """
        last = min(end, request.num_tokens - 1) // self.page_size * self.page_size
        stops = (self.branches[request.row or 0], last)
        return min((s for s in stops if request.num_computed_tokens < s < end), default=end)

    def advance(self, request: Request, num_tokens: int, block: int) -> None:
        """Note that a step continues the state of a request up to `num_tokens` tokens.

        If that is the end of the block, plan a snapshot. Without a free slot there is none: the
        answers do not need it, and a later request computes more tokens.
        """
        assert request.row is not None and not self.is_ahead(request), (
            f"I1: the state of {request} has tokens that were undone"
        )
        self.lengths[request.row] = num_tokens
        if num_tokens % self.page_size == 0 and self.free_slots:
            self.pages[block] = self.free_slots.pop()
            self.saves.append((request.row, self.pages[block]))

    def is_ahead(self, request: Request) -> bool:
        """Return whether a request's state has tokens of a step that was undone."""
        return self.lengths[request.row or 0] != request.num_computed_tokens

    def drop(self, block: int) -> None:
        """Free the snapshot of a block, if it has one."""
        if block in self.pages:
            self.free_slots.append(self.pages.pop(block))

    def replace(self, blocks: Sequence[int], new: Sequence[int]) -> None:
        """Give snapshots to the new blocks of the same tokens, if those have none."""
        for ours, theirs in zip(blocks, new, strict=False):
            if theirs not in self.pages and ours in self.pages:
                self.pages[theirs] = self.pages.pop(ours)

    def take_copies(self) -> tuple[Loads, Saves]:
        """Return the copies of the step that is launched now."""
        copies = self.loads, self.saves
        self.loads, self.saves = [], []
        return copies

    def check_invariants(self, blocks: Sequence[int]) -> None:
        """Raise `AssertionError` if a snapshot has no owner or two. blocks: all that exist."""
        assert self.pages.keys() <= {*blocks}, "I3: a block that is nowhere has a snapshot"
        slots = sorted([*self.pages.values(), *self.free_slots])
        assert slots == list(range(self.num_snapshots)), f"I3: slots of snapshots {slots}"
