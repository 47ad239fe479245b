"""Two first Triton kernels, to read and to change before m3.6.

    python milestones/m3_paged/warm_up_kernels.py

Triton's interpreter runs them without a GPU, one program after the other, so a `print` in a kernel
shows its numbers.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

import torch
import triton
import triton.language as tl


@triton.jit
def copy_row(source, target, length, BLOCK: tl.constexpr):
    """Copy a row of `length` numbers per program. BLOCK: a power of two, at least `length`."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # [BLOCK]: all columns at once
    inside = column < length
    values = tl.load(source + row * length + column, mask=inside, other=0.0)
    tl.store(target + row * length + column, values, mask=inside)


@triton.jit
def gather(
    pool, page_table, target, length,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy `length` tokens of DIM numbers out of their pages, in order of position."""
    position = tl.arange(0, BLOCK)
    inside = position < length
    page = tl.load(page_table + position // PAGE_SIZE, mask=inside, other=0)
    slot = page * PAGE_SIZE + position % PAGE_SIZE
    dim = tl.arange(0, DIM)
    # A column of slots and a row of dimensions make a rectangle of pointers: [BLOCK, DIM].
    values = tl.load(pool + slot[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
    tl.store(target + position[:, None] * DIM + dim[None, :], values, mask=inside[:, None])


def main() -> None:
    """Run both kernels, and print what they wrote."""
    source, target = torch.full((20,), 99.0), torch.full((20,), -1.0)
    source[:18] = torch.arange(18.0)  # 3 rows of 6 numbers, and memory that is not ours
    copy_row[(3,)](source, target, 6, BLOCK=8)
    print("rows  ", target[:18].view(3, 6).int().tolist())
    print("behind", target[18:].int().tolist())

    pool = torch.arange(8).repeat_interleave(2).view(8, 2)  # 4 pages of 2 slots; slot s holds s, s
    page_table = torch.tensor([3, 1, 2], dtype=torch.int32)
    tokens = torch.full((8, 2), -1)
    gather[(1,)](pool, page_table, tokens, 5, PAGE_SIZE=2, DIM=2, BLOCK=8)
    print("slots ", tokens[:, 0].tolist())


if __name__ == "__main__":
    main()
