"""Modules of which each rank computes a part. `Division` makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .ranks import Ranks


class Divided(nn.Module):
    """A mixin for a module of which each rank computes a part."""

    ranks: Ranks


class Summed(Divided):
    """A mixin for a module. Its output is the sum of what the ranks compute."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the summand of this rank. Return the sum, on every rank."""
        return self.ranks.add_parts(super().forward(*args, **kwargs))


class Joined(Divided):
    """A mixin for a linear layer. Each rank computes a part of its outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Return the outputs of all ranks, [..., out]."""
        return self.ranks.join_parts(super().forward(x))
