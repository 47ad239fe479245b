"""RMSNorm in fewer operations.

Hugging Face's RMSNorm takes seven operations: convert to float32, square, mean, add epsilon,
reciprocal root, and two products. If r is the root of the sum of squares, four are enough:

    x * weight / sqrt(mean(x^2) + eps)  =  x / hypot(r, sqrt(n * eps)) * (weight * sqrt(n))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .replace import probe, replace_forward


class _RMSNorm(nn.Module):
    """A mixin for an RMSNorm in float32."""

    scaled_weight: torch.Tensor  # [n] weight * sqrt(n)
    root_of_epsilon: torch.Tensor  # [] sqrt(n * eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., n] float32; returns the same shape."""
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        return torch.div(x, root.hypot_(self.root_of_epsilon)).mul_(self.scaled_weight)


class _TritonRMSNorm(nn.Module):
    """A mixin for an RMSNorm on CUDA."""

    weight: torch.Tensor
    epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., n]; returns the same shape."""
        from .triton_kernels import rms_norm

        return rms_norm(x, self.weight, self.epsilon)


def speed_up_norms(model: nn.Module) -> int:
    """Speed up the RMSNorms that compute `weight * x / rms(x)`; return their number."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    return sum(_speed_up(norm) for norm in norms)


def _speed_up(norm: nn.Module) -> bool:
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    # A norm without a parameter may be called with vectors of another size than its buffer.
    if not isinstance(weight, nn.Parameter) or not isinstance(epsilon, float):
        return False
    size = weight.numel()
    mixin: Any
    extra: dict[str, Any]
    if weight.device.type == "cuda":
        mixin, extra = _TritonRMSNorm, {"epsilon": epsilon}
    elif weight.dtype == torch.float32:
        mixin = _RMSNorm
        extra = {
            "scaled_weight": weight.detach() * size**0.5,
            "root_of_epsilon": torch.tensor((size * epsilon) ** 0.5, device=weight.device),
        }
    else:
        return False
    x = probe(5, size, like=weight) * torch.tensor([[0.0], [1e-3], [1.0], [1.0], [30.0]]).to(weight)
    return replace_forward(norm, mixin, extra, x)
