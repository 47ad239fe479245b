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
MKL, this holds below 128 rows. Packed float32 weights are kept in addition to the plain weights,
which the state dict and the embedding still need. A stored weight (`common/fast/stored`) is
different: it is packed already, only our own kernels read it, and there is no plain weight beside
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..cpu_kernels import Linear, kernels
from ..stored.modules import stored_of, with_stored
from ..stored.weight import StoredWeight
from .merge import shared_products
from .replace import probe, same, subclass

PACKED_FOR_ROWS = 16  # the number of rows that a layout is made for
TRIED_BYTES = 1 << 20  # for a smaller weight, the libraries are not timed
CLEARLY = 0.8  # a later library must take less than this fraction of the time to be chosen
MKL_ROWS = 128  # from that many rows on, the plain product is as fast as MKL
TRIED_ROWS = (1, 2, 3, 17)  # stored weights: numbers of rows with code of their own
TRIED_PANELS = 2

# A `Packing` converts a linear layer to a `Product`, a function from [..., in] to [..., out]. It
# raises `AttributeError` or `RuntimeError` if the library is not available.
Product = Callable[[torch.Tensor], torch.Tensor]
Packing = Callable[[nn.Linear], Product]


class StoredProductError(RuntimeError):
    """A product with a stored weight is not the product with the same weight in float32."""


class CompiledProduct:
    """A product by our own kernel, in C."""

    def __init__(self, linear: nn.Linear) -> None:
        """Raises `RuntimeError` if the kernels cannot be compiled."""
        found = kernels()
        if found is None:
            raise RuntimeError("the kernels need a C compiler")
        self.kernels = found
        self.weights = stored_of(linear) or _packed(linear, found.panel_size)
        self.bias = None if linear.bias is None else linear.bias.detach()
        for weight in self.weights:
            found.require_layout(weight)
        self.linear = Linear.of(self.weights, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.linear(x, self.linear)


def _packed(linear: nn.Linear, panel_size: int) -> list[StoredWeight]:
    """Return the float32 weights of a linear layer, one for each layer that was merged into it."""
    sizes = getattr(linear, "sizes", linear.out_features)
    return [StoredWeight.of_floats(part, panel_size) for part in linear.weight.split(sizes)]


def onednn(linear: nn.Linear) -> Product:
    """Return a product by Intel's open-source kernels, which run on CPUs of all vendors."""
    weight, bias = linear.weight, linear.bias
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def mkl(linear: nn.Linear) -> Product:
    """Return a product by Intel's own library, which is fast on Intel's CPUs."""
    weight, bias = linear.weight, linear.bias
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


class _StoredEmbedding(nn.Embedding):
    """A mixin for an embedding with a stored weight."""

    packed: Product

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [...]; returns [..., embedding_dim]."""
        return self.packed(ids)


def pack_linears(model: nn.Module) -> int:
    """Pack the linear layers of a float32 model on CPU; return their number.

    Raises `StoredProductError` if a stored weight gives other bits than its numbers in float32.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    merged = (product.linear for product in shared_products(model))
    linears += [linear for linear in merged if type(linear) is nn.Linear]
    linears = [
        linear
        for linear in linears
        if linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32
    ]
    stored = [linear for linear in linears if stored_of(linear)]
    plain = [linear for linear in linears if not stored_of(linear)]
    _try_formats(stored)
    for linear in stored:
        _replace(linear, _Packed, CompiledProduct(linear))
    for embedding in [m for m in with_stored(model) if type(m) is nn.Embedding]:
        _replace(embedding, _StoredEmbedding, _rows_of(embedding))
    packing = choose(max(plain, key=lambda linear: linear.weight.numel())) if plain else None
    if packing is None:
        return len(stored)
    for linear in plain:
        _replace(linear, _Packed, packing(linear))
    return len(linears)


def _replace(module: nn.Module, mixin: Any, packed: Product) -> None:
    original: Any = type(module)
    module.__class__ = subclass(mixin, original)
    module.__dict__["packed"] = packed


def _rows_of(embedding: nn.Embedding) -> Product:
    """Return the function from ids to the rows of a stored weight."""
    (stored,), found = stored_of(embedding), kernels()
    if found is None or embedding.max_norm is not None:
        raise StoredProductError("the embedding of the model changes its weight")
    return lambda ids: found.take_rows(ids, stored)


def _try_formats(linears: Iterable[nn.Linear]) -> None:
    """Compare the bits of a product in each format with those of float32.

    Raises `StoredProductError` if they differ.
    """
    weights = [weight for linear in linears for weight in stored_of(linear)]
    for format, weight in {
        weight.format: weight.beginning(TRIED_PANELS) for weight in weights
    }.items():
        whole = nn.Linear(weight.inputs, weight.out, bias=False, device="meta")
        whole.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        kept = nn.Linear(weight.inputs, weight.out, bias=False, device="meta")
        kept.__dict__["stored"] = (weight,)
        theirs, ours = CompiledProduct(whole), CompiledProduct(kept)
        for rows in TRIED_ROWS:
            x = probe(rows, weight.inputs, like=whole.weight)
            if not torch.equal(ours(x), theirs(x)):
                raise StoredProductError(f"{format.name}: products of {rows} rows differ")


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
        ours = packing(linear)(x)
    except (AttributeError, RuntimeError):  # no such operator in this build
        return False
    return same(ours, F.linear(x, linear.weight, linear.bias))


def _seconds(packing: Packing, linear: nn.Linear) -> float:
    """Return the time of a product of one row plus that of `PACKED_FOR_ROWS` rows, best of five."""
    product, total = packing(linear), 0.0
    for rows in (1, PACKED_FOR_ROWS):
        x, best = probe(rows, linear.in_features, like=linear.weight), float("inf")
        for _ in range(5):
            started = time.perf_counter()
            product(x)
            best = min(best, time.perf_counter() - started)
        total += best
    return total
