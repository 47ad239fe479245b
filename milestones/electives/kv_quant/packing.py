"""Packed lines: the key or the value of one token and one KV head in 8 bits per number.

    bytes   0   1   2   3 | 4        5        6        ...   3 + head_dim
            scale, float32 | int8     int8     int8     ...   int8

The scale is the largest absolute value of the line, divided by 127. A number is stored as the
nearest multiple of the scale, so it is off by at most half a scale. A line knows nothing about
other tokens, so a token has the same line in every chunk and every batch (I2).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from common.hf.support import LayerKV

SCALE_BYTES = 4  # a float32
LARGEST = 127  # -128 is not used: the numbers of a line lie on both sides of zero alike
PACKED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_pack(layers: Iterable[LayerKV], dtype: torch.dtype) -> bool:
    """Return whether the keys and values of a model can be packed.

    The scale must lie at a multiple of four bytes, so the head dimension must be such a multiple.
    """
    dims = {dim for layer in layers for dim in (layer.key_dim, layer.value_dim)}
    return dtype in PACKED_TYPES and all(dim % SCALE_BYTES == 0 for dim in dims)


def pack(x: torch.Tensor) -> torch.Tensor:
    """Return the lines of keys or values: [..., head_dim] to [..., 4 + head_dim] int8.

    A line of zeros stays zero. Where a number is not finite, the scale is not finite either, and so
    the whole line: a wrong number must not look like a right one.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST
    # The scale is 0 for zeros, and for numbers that are so small that their scale is none.
    numbers = (x / scale.where(scale > 0, 1.0)).round().clamp(-LARGEST, LARGEST)
    return torch.cat([scale.view(torch.int8), numbers.to(torch.int8)], dim=-1)


def unpack(lines: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of packed lines: [..., 4 + head_dim] int8 to [..., head_dim]."""
    scale = lines[..., :SCALE_BYTES].view(torch.float32)
    return (lines[..., SCALE_BYTES:] * scale).to(dtype)
