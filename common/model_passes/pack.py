"""Linear layers on CPU whose weights lie in the order in which the kernels read them.

`F.linear` lays a weight out anew in each call, which for the few rows of a decode step costs more
than the product. oneDNN and MKL both take a weight that was laid out once; torch's own compiler
calls them the same way. Which of the two is faster depends on the CPU, by a factor of two: the
largest layer is tried with both. All linears of SmolLM2-135M in ms on two cores:

    rows                                   1     4     8    16    32    64
    AMD EPYC (AVX2)         F.linear      41    76   129    95   111   168
                            oneDNN        34    39    45    62    95   150
                            MKL           39    80    85   110   150   220
    Intel Xeon (AVX-512)    F.linear      31    72    87   135   187
                            MKL           27    29    33    40    55

Both give a row bitwise the result that it has alone (I2), however many are computed with it. The
packed weights are held beside the plain ones, which the state dict and the embedding still need.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from .merge import products
from .replace import probe, same, subclass

PACKED_FOR_ROWS = 16  # the number of rows that a layout is made for
TRIED_BYTES = 1 << 20  # a weight smaller than this is not worth a trial
CLEARLY = 0.8  # MKL has to take less than this part of oneDNN's time


class Packing(Protocol):
    """A library that multiplies with weights laid out by itself."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [out, in] in a layout that only `linear` understands."""

    def linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product of x [..., in] and the weight, with the bias: [..., out]."""


class OneDNN:
    """Intel's open kernels, for CPUs of all makers."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)

    def linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class MKL:
    """Intel's own library, fast on Intel's CPUs."""

    MAX_ROWS = 128  # from here on the plain product is as fast

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_FOR_ROWS)

    def linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows >= self.MAX_ROWS:
            return F.linear(x, weight, bias)
        return torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)


class _Packed(nn.Linear):
    """Mixed into a linear layer that has its weight packed."""

    packing: Packing
    packed: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return self.packing.linear(x, self.packed, self.weight, self.bias)


def pack_linears(model: nn.Module) -> int:
    """Pack the linear layers of a float32 model on CPU; how many there were."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    linears += [product.linear for product in products(model)]
    linears = [
        linear
        for linear in linears
        if linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
    ]
    packing = choose(max(linears, key=lambda linear: linear.weight.numel())) if linears else None
    if packing is None:
        return 0
    for linear in linears:
        linear.__class__ = subclass(_Packed, nn.Linear)
        linear.__dict__.update(packing=packing, packed=packing.pack(linear.weight.detach()))
    return len(linears)


def choose(linear: nn.Linear) -> Packing | None:
    """The faster of those that are right on this machine; None if none is."""
    working = [packing for packing in (OneDNN(), MKL()) if _is_right(packing, linear)]
    if len(working) < 2 or linear.weight.nbytes < TRIED_BYTES:
        return working[0] if working else None
    seconds = [_seconds(packing, linear) for packing in working]
    return working[1] if seconds[1] < CLEARLY * seconds[0] else working[0]


def _is_right(packing: Packing, linear: nn.Linear) -> bool:
    """Whether a torch without this library, or another version of it, still computes the same."""
    x = probe(3, linear.in_features, like=linear.weight) * linear.in_features**-0.5
    try:
        packed = packing.pack(linear.weight.detach())
        ours = packing.linear(x, packed, linear.weight, linear.bias)
    except (AttributeError, RuntimeError):  # no such operator in this build
        return False
    return same(ours, F.linear(x, linear.weight, linear.bias))


def _seconds(packing: Packing, linear: nn.Linear) -> float:
    """The best of some products, of one row and of as many as a layout is made for."""
    packed, total = packing.pack(linear.weight.detach()), 0.0
    for rows in (1, PACKED_FOR_ROWS):
        x, best = probe(rows, linear.in_features, like=linear.weight), float("inf")
        for _ in range(5):
            started = time.perf_counter()
            packing.linear(x, packed, linear.weight, linear.bias)
            best = min(best, time.perf_counter() - started)
        total += best
    return total
