"""The formats of a line: integers of 8 bits (`packing.py`), floats of 8 bits (e4m3), or 4 bits.

    int8    scale, float32                 | sign, 7 bits                          -127 to 127
    fp8     scale, float32                 | sign, 4 bits exponent, 3 bits fraction
    int4    scale and low, both bfloat16   | 4 bits, two numbers in a byte         0 to 15

In fp8, the scale is the largest absolute value divided by 448, the largest e4m3 number. Small
numbers have small steps: a number is off by at most a 16th of its own size, or 1/1024 of the scale.

In int4, a number is `low` and 0 to 15 steps of the scale, from the smallest number of the line to
the largest. Byte i has the steps of the numbers i and head_dim / 2 + i.
"""

from __future__ import annotations

import torch

from .packing import SCALE_BYTES, pack, unpack

# The type of the memory says the format. It is not that of the numbers, because torch has no type
# of 4 bits, and cannot write to float8 by index on a CPU.
FORMATS = {"int8": torch.int8, "fp8": torch.uint8, "int4": torch.int16}
E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448
LARGEST_INT4 = 15


def find_format(name: str) -> torch.dtype:
    """Return the type of the memory. Raises `ValueError` for an unknown name."""
    if name not in FORMATS:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def is_packed(memory: torch.Tensor) -> bool:
    """Return whether the keys or values of a layer are packed lines."""
    return memory.dtype in FORMATS.values()


def pack_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the lines of keys or values: [..., head_dim] to [..., length of a line] of `dtype`."""
    return {torch.int8: pack, torch.uint8: pack_fp8, torch.int16: pack_int4}[dtype](x)


def unpack_as(lines: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of lines of any format: [..., length of a line] to [..., head_dim]."""
    if lines.dtype == torch.int8:
        return unpack(lines, dtype)
    if lines.dtype == torch.int16:
        return unpack_int4(lines, dtype)
    scale = lines[..., :SCALE_BYTES].view(torch.float32)
    return (lines[..., SCALE_BYTES:].view(E4M3).float() * scale).to(dtype)


def line_length(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many elements of the type `dtype` a line has."""
    numbers = head_dim // 2 if dtype == torch.int16 else head_dim
    return (SCALE_BYTES + numbers) // dtype.itemsize


def pack_fp8(x: torch.Tensor) -> torch.Tensor:
    """Return lines of e4m3, uint8. torch rounds to the nearest number, and a half to an even one.

    As in `pack`, zeros stay zero, and a number that is not finite makes the line not finite.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST_E4M3
    numbers = (x / scale.where(scale > 0, 1.0)).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], dim=-1)


def pack_int4(x: torch.Tensor) -> torch.Tensor:
    """Return lines of 4 bits: [..., head_dim] to [..., 2 + head_dim / 4] int16.

    Where a number is not finite, `low` or the scale is not finite either, and so the whole line.
    """
    x = x.float()
    low = (x.amin(dim=-1, keepdim=True) + 0.0).bfloat16()  # -0 becomes 0, as in C and in Triton
    scale = ((x.amax(dim=-1, keepdim=True) - low.float()) / LARGEST_INT4).bfloat16()
    steps = (x - low.float()) / scale.float().where(scale > 0, 1.0)
    steps = steps.nan_to_num().round().clamp(0, LARGEST_INT4)  # NaN has no integer
    first, second = steps.to(torch.uint8).chunk(2, dim=-1)
    parts = scale, low, first | second << 4
    return torch.cat([part.view(torch.int16) for part in parts], dim=-1)


def unpack_int4(lines: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of lines of 4 bits: [..., 2 + head_dim / 4] to [..., head_dim]."""
    scale, low = lines[..., :2].view(torch.bfloat16).float().split(1, dim=-1)
    steps = lines[..., 2:].view(torch.uint8)
    return (low + torch.cat([steps & 15, steps >> 4], dim=-1) * scale).to(dtype)
