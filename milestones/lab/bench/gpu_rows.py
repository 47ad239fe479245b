"""The fused kernels between the products of a layer, apart, for `gpu-check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

from common.fast.passes import triton_kernels as fused
from common.fast.passes.rotary import signed, turn

from .gpu_kernels import seconds

HIDDEN, WIDTH, HEADS, DIM = 1024, 3072, (16, 8), 128  # of Qwen3-0.6B
EPSILON = 1e-6


def row_kernels(device: str, tokens: int = 256) -> dict[str, Any]:
    """Measure what fused kernels save: the same work in one kernel, in more kernels, and in torch.

    tokens: of a decode step, with one of each request.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=device).to(dtype)

    x, residual, both = random(HIDDEN), random(HIDDEN), random(2 * WIDTH)
    qkv, angles = random((HEADS[0] + 2 * HEADS[1]) * DIM), random(1, DIM)
    weight, head_weight = (torch.ones(n, device=device, dtype=dtype) for n in (HIDDEN, DIM))
    cos, signed_sin = angles.cos(), signed(angles.sin())
    q, k, _v = qkv.view(1, tokens, -1, DIM).split([*HEADS, HEADS[1]], dim=2)
    gate, up = both.chunk(2, dim=-1)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(dtype)

    def norm_and_rotate_apart() -> None:
        normed = [fused.rms_norm(part, head_weight, EPSILON).transpose(1, 2) for part in (q, k)]
        fused.rotate(normed[0], normed[1], cos[:, :, 0], signed_sin[:, :, 0])

    def norm_and_rotate_in_torch() -> None:
        for part in (q, k):
            turn(norm(part, head_weight), cos, signed_sin)

    works: dict[str, dict[str, Callable[[], Any]]] = {
        "sum and norm": {
            "fused": lambda: fused.add_rms_norm(x, residual, weight, EPSILON),
            "apart": lambda: fused.rms_norm(x.add_(residual), weight, EPSILON),
            "torch": lambda: norm(x.add_(residual), weight),
        },
        "norm and rotation of heads": {
            "fused": lambda: fused.norm_and_rotate(
                qkv, HEADS, DIM, cos, signed_sin, (head_weight, head_weight), EPSILON
            ),
            "apart": norm_and_rotate_apart,
            "torch": norm_and_rotate_in_torch,
        },
        "activation and product": {
            "fused": lambda: fused.silu_mul(gate, up),
            "torch": lambda: silu(gate) * up,
        },
    }
    times = {
        name: {kind: 1e6 * seconds(work, device) for kind, work in kinds.items()}
        for name, kinds in works.items()
    }
    return {"tokens": tokens, "us": times, "passed": True}
