"""Sums over the inputs of a layer: in a fixed order, and in orders that depend on the batch.

A sum of floating-point numbers depends on its order, because each addition rounds its result. The
functions here differ only in where they cut a sum into parts:

    x        a b c d e f g h             a row of K inputs
    1 part   ((((((a+b)+c)+d)+e)+f)+g)+h
    4 parts  (((a+b) + (c+d)) + (e+f)) + (g+h)

A fast kernel takes more parts if the batch has few rows, so that all cores have work (split-K).
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

TILE = 8  # rows of one product of the fixed order
PARTS = 4  # of a sum in a fixed number of parts
MOST_PARTS = 8  # of a sum for a single row


def fixed_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ weight.T + bias`. I2: a row has the same bits with any number of other rows.

    x: [..., K]. weight: [N, K]. torch chooses a kernel by the shapes of a product, so each product
    here has `TILE` rows: the rows of x, and rows of zeros behind the last one.
    """
    rows = x.flatten(0, -2)  # [T, K]
    padded = pad(rows, (0, 0, 0, -len(rows) % TILE))
    tiles = [linear(tile, weight, bias) for tile in padded.split(TILE)]
    return torch.cat(tiles)[: len(rows)].unflatten(0, x.shape[:-1])


def split_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int = PARTS,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, as the sum of products over `num_parts` parts of K.

    dtype: of the partial sums, and of the additions that join them.
    """
    size = -(-x.shape[-1] // num_parts)
    pairs = zip(x.split(size, dim=-1), weight.split(size, dim=-1), strict=True)
    first, *others = (fixed_product(part, columns).to(dtype) for part, columns in pairs)
    total = first
    for partial in others:
        total = total + partial
    total = total.to(x.dtype)
    return total if bias is None else total + bias


def fixed_mean(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row, [..., 1]. torch adds up a row in an order of its own length."""
    return x.sum(dim=-1, keepdim=True) / x.shape[-1]


def split_mean(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the mean of each row, [..., 1], as the sum of `num_parts` partial sums."""
    size = -(-x.shape[-1] // num_parts)
    sums = [part.sum(dim=-1, keepdim=True) for part in x.split(size, dim=-1)]
    return torch.stack(sums).sum(dim=0) / x.shape[-1]


def parts_for(num_rows: int) -> int:
    """Return into how many parts a fast kernel cuts a sum: fewer for a batch of more rows."""
    return max(1, MOST_PARTS // max(1, num_rows))  # a step may need the logits of no token


def product_by_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Split-K as a fast kernel has it: not batch-invariant."""
    return split_product(x, weight, bias, num_parts=parts_for(x.flatten(0, -2).shape[0]))


def product_by_rows_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Split-K with partial sums in bfloat16: not batch-invariant."""
    num_parts = parts_for(x.flatten(0, -2).shape[0])
    return split_product(x, weight, bias, num_parts=num_parts, dtype=torch.bfloat16)


def fixed_product_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A fixed number of parts, in bfloat16. It rounds more, and is batch-invariant (I2)."""
    return split_product(x, weight, bias, dtype=torch.bfloat16)


def mean_by_rows(x: torch.Tensor) -> torch.Tensor:
    """A norm with more parts for fewer rows: not batch-invariant."""
    return split_mean(x, parts_for(x.flatten(0, -2).shape[0]))
