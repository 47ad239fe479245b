"""Store the weights of linear layers on CPU in the order in which the kernels read them.

`F.linear` reorders a weight in each call. For the few rows of a decode step, this takes longer than
the product. Three kinds of kernels accept a weight that was reordered once: our own, compiled on
this machine, and those of oneDNN and MKL, which torch's own compiler uses in the same way. Time of
all linear layers of SmolLM2-135M in ms, on two cores:

    rows                                   1     4     8    16    32    64
    AMD EPYC (AVX2)         F.linear      41    76   129    95   111   168
                            MKL           39    80    85   110   150   220
                            oneDNN        34    39    45    62    95   150
                            our own       22    22    28    40    69   100
    Intel Xeon (AVX-512)    F.linear      31    72    87   135   187
                            MKL           27    29    33    40    55

With all three, the result of a row has the same bits as if the row were computed alone (I2). With
MKL, this holds below 128 rows. The packed weights are kept in addition to the plain weights, which
the state dict and the embedding still need.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ..cpu_kernels import Linear, kernels
from .merge import products
from .replace import probe, same, subclass

PACKED_FOR_ROWS = 16  # the number of rows that a layout is made for
TRIED_BYTES = 1 << 20  # for a smaller weight, the libraries are not timed
CLEARLY = 0.8  # a later library must take less than this fraction of the time to be chosen
MKL_ROWS = 128  # from so many rows on, the plain product is as fast as MKL

# A `Packing` converts a weight [out, in] and a bias [out] to a `Product`, a function from [..., in]
# to [..., out]. It raises `AttributeError` or `RuntimeError` if the library is not available.
Product = Callable[[torch.Tensor], torch.Tensor]
Packing = Callable[[torch.Tensor, torch.Tensor | None], Product]


class CompiledProduct:
    """A product by our own kernel, in C."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raises `RuntimeError` if the kernels cannot be compiled."""
        found = kernels()
        if found is None:
            raise RuntimeError("the kernels need a C compiler")
        self.kernels = found
        self.tensors = found.pack(weight), bias  # kept alive: C has only their addresses
        self.linear = Linear.of(*self.tensors, out_features=len(weight))
        self.by_turns = False

    def lay_by_turns(self) -> None:
        """Reorder the outputs: a panel of the first half (gate), then its panel of the second (up).

        The kernel that also applies the activation reads the weight in this order. Raises
        `TypeError` if the halves do not consist of whole panels.
        """
        if self.by_turns:
            return
        size, (weight, bias) = self.kernels.panel_size, self.tensors
        if self.linear.out % (2 * size):
            raise TypeError(f"{self.linear.out} outputs are not two halves of panels of {size}")
        weight.copy_(_by_turns(weight))
        if bias is not None:
            bias = _by_turns(bias.view(-1, size)).flatten()
        self.tensors, self.by_turns = (weight, bias), True
        self.linear = Linear.of(*self.tensors, out_features=self.linear.out)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.kernels.linear(x, self.linear)
        if self.by_turns:
            out = out.unflatten(-1, (-1, 2, self.kernels.panel_size)).transpose(-3, -2).flatten(-3)
        return out


def _by_turns(panels: torch.Tensor) -> torch.Tensor:
    """Return a copy of panels, [2 * n, ...], with the panels of both halves in turn."""
    return panels.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return a product by Intel's open-source kernels, which run on CPUs of all vendors."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def mkl(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return a product by Intel's own library, which is fast on Intel's CPUs."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_FOR_ROWS)

    def product(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows >= MKL_ROWS:
            return F.linear(x, weight, bias)
        return torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)

    return product


PACKINGS: tuple[Packing, ...] = (CompiledProduct, onednn, mkl)


class _Packed(nn.Linear):
    """A mixin for a linear layer that has a packed weight."""

    packed: Product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return self.packed(x)


def pack_linears(model: nn.Module) -> int:
    """Pack the linear layers of a float32 model on CPU; return their number."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    merged = (product.linear for product in products(model))
    linears += [linear for linear in merged if type(linear) is nn.Linear]
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
        linear.__dict__["packed"] = pack(linear, packing)
    return len(linears)


def pack(linear: nn.Linear, packing: Packing) -> Product:
    """Return a function that computes `linear` with its current weight, packed."""
    return packing(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def choose(linear: nn.Linear) -> Packing | None:
    """Return the packing for this machine: the first that is correct, or a clearly faster one.

    Returns None if no packing is correct.
    """
    working = [packing for packing in PACKINGS if is_right(packing, linear)]
    if len(working) < 2 or linear.weight.nbytes < TRIED_BYTES:
        return working[0] if working else None
    seconds = {packing: _seconds(packing, linear) for packing in working}
    chosen = working[0]
    for packing in working[1:]:
        if seconds[packing] < CLEARLY * seconds[chosen]:
            chosen = packing
    return chosen


def is_right(packing: Packing, linear: nn.Linear) -> bool:
    """Return whether a packing works with this version of torch and computes the same product."""
    x = probe(3, linear.in_features, like=linear.weight) * linear.in_features**-0.5
    try:
        ours = pack(linear, packing)(x)
    except (AttributeError, RuntimeError):  # no such operator in this build
        return False
    return same(ours, F.linear(x, linear.weight, linear.bias))


def _seconds(packing: Packing, linear: nn.Linear) -> float:
    """Return the time of a product of one row plus that of `PACKED_FOR_ROWS` rows, best of five."""
    product, total = pack(linear, packing), 0.0
    for rows in (1, PACKED_FOR_ROWS):
        x, best = probe(rows, linear.in_features, like=linear.weight), float("inf")
        for _ in range(5):
            started = time.perf_counter()
            product(x)
            best = min(best, time.perf_counter() - started)
        total += best
    return total
