"""Linear layers for CPU that are fast for a few rows.

A decode step multiplies a handful of rows with large weights. For a product that flat,
`weight @ x.T` reads the weight in the order it lies in memory, where `F.linear` lays it out anew
first. Such products are tuned for whole blocks of columns: 16 of them cost less than 9, and 24 less
than 22, so a few rows are added. All linears of the embedded model, in ms, on an AMD EPYC with two
cores:

    rows                           1     4     8    10    12    16    32    64
    F.linear                      39    81   103   101   101   103   162   204
    weight @ x.T                  46    44    73   107    87    65   109   153
    weight @ x.T, padded          69    80    70    79    69    74   114   154
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

MIN_ROWS, MAX_ROWS = 2, 64  # outside, F.linear is as fast
MIN_PADDED_ROWS = 6  # from so many rows on, round up: to 16, then to whole blocks of 8
FIRST_BLOCK, BLOCK = 16, 8


class SkinnyLinear(nn.Linear):
    """An `nn.Linear` that turns the product around where that is faster. For inference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]; returns [..., out_features], contiguous."""
        rows = x.numel() // self.in_features
        if not MIN_ROWS <= rows <= MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        padded = x.reshape(rows, -1)
        if rows >= MIN_PADDED_ROWS:
            missing = max(FIRST_BLOCK - rows, -rows % BLOCK)
            padded = F.pad(padded, (0, 0, 0, missing)) if missing else padded
        y = (self.weight @ padded.t()).t()[:rows].contiguous()  # [rows, out_features]
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


def use_skinny_linears(model: nn.Module) -> None:
    """Make all linear layers of a float32 model on CPU skinny ones, in place.

    Parameters and their names stay what they are: only `forward` is another.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    for linear in linears:
        if linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32:
            linear.__class__ = SkinnyLinear
