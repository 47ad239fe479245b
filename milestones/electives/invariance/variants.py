"""The variants of the engine: by which functions it computes the operations of the model.

`exact` is m5 as it is. All other variants run Hugging Face's own lines, and replace three
operations. In `fixed` all three have a fixed order. Each broken variant changes one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from . import attention
from .split_attention import SplitAttention, split_at_chunk, split_by_batch
from .sums import (
    fixed_mean,
    fixed_product,
    fixed_product_bf16,
    mean_by_rows,
    product_by_rows,
    product_by_rows_bf16,
)


@dataclass(frozen=True)
class Variant:
    """The functions that compute three operations. By default, each one has a fixed order."""

    depends_on: str = ""  # what the order of a sum depends on; "": on nothing
    product: Callable[..., torch.Tensor] = fixed_product  # of each `torch.nn.Linear`
    mean: Callable[[torch.Tensor], torch.Tensor] = fixed_mean  # of each RMSNorm
    attention: Any = field(default_factory=SplitAttention)  # with the functions of `attention.py`

    def operations(self) -> AbstractContextManager[Any]:
        """Return a context in which the model computes with these functions."""
        return Operations(self)


@dataclass(frozen=True)
class Unchanged(Variant):
    """The operations of m5: the kernels in C, where they can run."""

    def operations(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Operations(TorchFunctionMode):
    """Replaces operations while it is active, as vLLM and SGLang replace those of torch."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is linear:
            return self.variant.product(*args, **(kwargs or {}))
        if function is torch.Tensor.mean and args[1:] == (-1,):
            return self.variant.mean(args[0])
        return function(*args, **(kwargs or {}))


def plain_mean(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row, [..., 1], by torch."""
    return x.mean(-1, keepdim=True)


EXACT = Unchanged()
FIXED = Variant()
VARIANTS: dict[str, Variant] = {
    "exact": EXACT,
    "fixed": FIXED,
    "torch": Variant("the shape of a product", linear, plain_mean, attention),
    "split_k": replace(FIXED, depends_on="the rows of a step", product=product_by_rows),
    "split_k_bf16": replace(FIXED, depends_on="the rows of a step", product=product_by_rows_bf16),
    "fixed_bf16": replace(FIXED, product=fixed_product_bf16),
    "split_norm": replace(FIXED, depends_on="the rows of a step", mean=mean_by_rows),
    "split_kv": replace(
        FIXED, depends_on="the requests that decode",
        attention=SplitAttention(of_decodes=split_by_batch),
    ),
    "split_at_chunk": replace(
        FIXED, depends_on="the borders of chunks",
        attention=SplitAttention(of_chunks=split_at_chunk),
    ),
}  # fmt: skip


def find_variant(name: str) -> Variant:
    """Return a variant. Raises `ValueError` for an unknown name."""
    if name not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {name!r}")
    return VARIANTS[name]
