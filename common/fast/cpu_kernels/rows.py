"""Operations on the rows of a step, for a layer that is computed in separate parts.

A layer with adapters needs the results between the parts that `layer.c` usually joins. Each part
gives the same bits as in the joined layer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from .structs import POINTER, SIZE, Heads, Layer, checked

SIGNATURES = {
    "norm_rows": (POINTER, POINTER, ctypes.c_double, SIZE, POINTER, SIZE, ctypes.c_int),
    "turn_heads": (POINTER, POINTER, ctypes.c_int),
    "activate_rows": (POINTER, POINTER, SIZE, SIZE, ctypes.c_int),
    "argmax_rows": (POINTER, SIZE, SIZE, POINTER, ctypes.c_int),
    "add_low_rank": (
        POINTER, POINTER, SIZE, *[POINTER] * 4, *[SIZE] * 4, ctypes.c_int,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RowKernels:
    """The part of `Kernels` that computes one part of a layer for some rows."""

    library: ctypes.CDLL

    def norm_rows(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the RMSNorm of each row. x: [..., n]; weight: [n]."""
        x = checked(x).contiguous()
        size = x.shape[-1]
        if checked(weight).shape != (size,):
            raise ValueError(f"the weight of a norm of {size} numbers is {tuple(weight.shape)}")
        out = torch.empty_like(x)
        self.library.norm_rows(
            x.data_ptr(), weight.data_ptr(), epsilon, size, out.data_ptr(), x.numel() // size,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def turn_heads(self, layer: Layer, qkv: torch.Tensor, heads: Heads) -> None:
        """Write q, k and v to `heads`, with q and k normalized and rotated.

        qkv: [B, T, heads * head_dim], the product of the layer.
        """
        memory = heads.kept[-1]
        if qkv.numel() != memory.numel() or heads.sizes != layer.sizes:
            raise ValueError(f"{tuple(qkv.shape)} are not the heads {tuple(memory.shape)}")
        memory.copy_(checked(qkv).view(memory.shape))
        self.library.turn_heads(layer.address, heads.address, torch.get_num_threads())

    def activate_rows(self, both: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [..., width]. both: [..., 2 * width], gate and then up."""
        both = checked(both).contiguous()
        width = both.shape[-1] // 2
        out = both.new_empty((*both.shape[:-1], width))
        self.library.activate_rows(
            both.data_ptr(), out.data_ptr(), width, out.numel() // width, torch.get_num_threads()
        )
        return out

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Return the index of the largest number in each row, as torch's `argmax`. x: [B, V]."""
        rows, width = checked(x).shape
        if width == 0:
            raise ValueError("a row without numbers has no largest one")
        x, out = x.contiguous(), torch.empty(rows, dtype=torch.int64)
        self.library.argmax_rows(x.data_ptr(), width, rows, out.data_ptr(), torch.get_num_threads())
        return out

    def add_low_rank(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        slots: torch.Tensor,
        ranks: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> None:
        """Add x A^T B to each row of y, with the matrices of the row's slot.

        x: [rows, in]; y: [rows, out], which may be a part of longer rows; slots: [rows] int64;
        ranks: [S] int64, the lines of A and B that a slot uses; a: [S, rank, in]; b: [S, rank,
        out]. The bits of a row do not depend on the other rows.
        """
        x = checked(x).contiguous()
        (rows, width), (num_slots, rank, out) = x.shape, b.shape
        shapes = y.shape == (rows, out) and a.shape == (num_slots, rank, width)
        if not (shapes and slots.shape == (rows,) and ranks.shape == (num_slots,)):
            raise ValueError(
                f"x {tuple(x.shape)}, y {tuple(y.shape)}, slots {tuple(slots.shape)} and ranks "
                f"{tuple(ranks.shape)} do not fit a {tuple(a.shape)} and b {tuple(b.shape)}"
            )
        kept = (checked(a), checked(b), slots, ranks)
        if not all(part.is_contiguous() for part in kept) or checked(y).stride(-1) != 1:
            raise ValueError("a, b, slots, ranks and the rows of y must be contiguous")
        if {slots.dtype, ranks.dtype} != {torch.int64} or not (slots.is_cpu and ranks.is_cpu):
            raise TypeError("slots and ranks must be int64 on a CPU")
        if rows:
            self.library.add_low_rank(
                x.data_ptr(), y.data_ptr(), y.stride(0), slots.data_ptr(), ranks.data_ptr(),
                a.data_ptr(), b.data_ptr(), width, out, rank, rows, torch.get_num_threads(),
            )  # fmt: skip
