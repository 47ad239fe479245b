"""Merge linear layers that read the same input into one product.

An attention layer calls `q_proj`, `k_proj` and `v_proj` one after the other with the same tensor. A
gated MLP does this with `gate_proj` and `up_proj`. The first of these calls computes the product
with all weights, and the other calls take their part of the result. The code of the model does not
change.
"""

from __future__ import annotations

import torch
from torch import nn

from ..cpu_kernels import kernels
from ..stored.modules import keep, stored_of, stored_weights
from .replace import subclass

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class SharedProduct:
    """One product of an input with the weights of several layers."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        """Merge the weights of `linears`. Their own weights become views of the merged weight.

        Stored weights are not moved: the product has several weights then.
        """
        self.sizes = [linear.out_features for linear in linears]
        first = linears[0]
        self.linear = nn.Linear(
            first.in_features, sum(self.sizes), bias=first.bias is not None, device="meta"
        )
        self.linear.__dict__["sizes"] = self.sizes
        found = kernels()
        if found is not None and any(stored_of(linear) for linear in linears):
            size = found.panel_size
            keep(self.linear, *(w for linear in linears for w in stored_weights(linear, size)))
        else:
            self.linear.weight = _merged([linear.weight for linear in linears])
        if first.bias is not None:
            self.linear.bias = _merged([linear.bias for linear in linears])
        self._latest: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the output of layer `index` for `x`, as a view of the merged product.

        Threads may call this at the same time: if the latest product is not for the same tensor
        `x`, it is computed again.
        """
        latest = self._latest
        if latest is None or latest[0] is not x:
            latest = x, self.linear(x).split(self.sizes, dim=-1)
        # After the last layer has taken its part, keep neither the input nor the product.
        self._latest = latest if index + 1 < len(self.sizes) else None
        return latest[1][index]


class _Merged:
    """A mixin for a linear layer that is a part of a `SharedProduct`."""

    product: SharedProduct
    index: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]; returns a view [..., out_features] of the shared product."""
        return self.product.part(x, self.index)


def merge_linears(model: nn.Module) -> int:
    """Merge the `GROUPS` of every module; return the number of merged groups."""
    merged = 0
    for module in list(model.modules()):
        for names in GROUPS:
            layers = [getattr(module, name, None) for name in names]
            linears = [layer for layer in layers if type(layer) is nn.Linear]
            if len(linears) < len(names) or not _alike(linears):
                continue
            product = SharedProduct(linears)
            for index, linear in enumerate(linears):
                linear.__class__ = subclass(_Merged, nn.Linear)
                linear.__dict__.update(product=product, index=index)
            merged += 1
    return merged


def shared_products(model: nn.Module) -> list[SharedProduct]:
    """Return the shared products of a model, each only once."""
    modules = (module for module in model.modules() if isinstance(module, _Merged))
    return list(dict.fromkeys(module.product for module in modules))


def _alike(linears: list[nn.Linear]) -> bool:
    kinds = {
        (linear.in_features, linear.bias is None, linear.weight.dtype, linear.weight.device)
        for linear in linears
    }
    tied = len({linear.weight.data_ptr() for linear in linears}) < len(linears)
    return len(kinds) == 1 and not tied


def _merged(parameters: list[torch.Tensor]) -> nn.Parameter:
    whole = nn.Parameter(torch.cat([p.data for p in parameters]), requires_grad=False)
    for parameter, view in zip(
        parameters, whole.data.split([len(p) for p in parameters]), strict=True
    ):
        parameter.data = view
    return whole
