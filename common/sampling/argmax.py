"""The index of the largest number in each row: torch's `argmax`, faster on a CPU."""

from __future__ import annotations

import torch

from ..fast import kernels


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest number in each row.

    x: [B, V]. Returns [B] int64. Of equal numbers, the first one counts. If a row contains NaN, the
    result is the index of its first NaN.

    On a CPU, torch's `argmax` compares one number at a time: 0.9 ms for 16 rows of 49,152 numbers.
    The kernel in C takes 0.1 ms.
    """
    found = kernels() if x.is_cpu and x.dtype == torch.float32 else None
    return x.argmax(dim=-1) if found is None else found.argmax(x)
