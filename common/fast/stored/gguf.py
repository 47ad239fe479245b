"""The blocks of a GGUF file as scales and quanta.

A weight in a GGUF file is a table of blocks, [out, blocks of a row]. A block has the bytes of 32 or
256 inputs. `ggml-quants.h` of llama.cpp defines the blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .formats import ZERO_FACTOR, Bytes, Quanta


def q4_0(blocks: Bytes) -> Quanta:
    """Parse a scale and 16 bytes: first the low four bits of all, then the high ones."""
    return Quanta(_halves(blocks[..., 2:]), _fp16(blocks, 0))


def q4_1(blocks: Bytes) -> Quanta:
    """Parse a scale, a minimum and 16 bytes as in `q4_0`."""
    return Quanta(_halves(blocks[..., 4:]), _fp16(blocks, 0), _fp16(blocks, 2))


def q5_0(blocks: Bytes) -> Quanta:
    """Parse a scale, the highest bits of 32 quanta, and 16 bytes as in `q4_0`."""
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return Quanta(_halves(blocks[..., 6:]) | _rows(high) << 4, _fp16(blocks, 0))


def q5_1(blocks: Bytes) -> Quanta:
    """Parse a scale, a minimum, the highest bits of 32 quanta, and 16 bytes as in `q4_0`."""
    high = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little")
    quanta = _halves(blocks[..., 8:]) | _rows(high) << 4
    return Quanta(quanta, _fp16(blocks, 0), _fp16(blocks, 2))


def q8_0(blocks: Bytes) -> Quanta:
    """Parse a scale and 32 signed bytes."""
    return Quanta(_rows(blocks[..., 2:]) ^ 128, _fp16(blocks, 0))


def q4_k(blocks: Bytes) -> Quanta:
    """Parse a scale, a minimum, eight factors of each, and 128 bytes of 256 quanta.

    32 bytes have the low four bits of 32 quanta and then the high ones of the next 32.
    """
    return _with_factors(blocks, _nibbles(blocks[..., 16:], 32))


def q5_k(blocks: Bytes) -> Quanta:
    """Parse what `q4_k` does, and 32 bytes of highest bits: one of each byte for 32 quanta."""
    high = blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
    return _with_factors(blocks, _nibbles(blocks[..., 48:], 32) | _rows(high.swapaxes(-1, -2)) << 4)


def q6_k(blocks: Bytes) -> Quanta:
    """Parse 128 bytes of low bits, 64 bytes of high bits, 16 signed factors, and a scale.

    Each half of a block has 128 quanta: 64 bytes as in `q4_k`, and 32 bytes with two bits each of
    four times 32 quanta.
    """
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = high >> np.array([[0], [2], [4], [6]], dtype=np.uint8) & 3
    quanta = _nibbles(blocks[..., :128], 64) | _rows(high) << 4
    factors = blocks[..., 192:208] ^ ZERO_FACTOR
    return Quanta(quanta, _fp16(blocks, 208), scale_factors=factors)


BLOCKS: dict[str, Callable[[Bytes], Quanta]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}


def _fp16(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """Return a number of each block, [out, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _rows(quanta: Bytes) -> Bytes:
    """Return quanta, [out, blocks, ...], as rows [out, in]."""
    return quanta.reshape(len(quanta), -1)


def _halves(packed: Bytes) -> Bytes:
    """Return rows of quanta of blocks of 16 bytes."""
    return _rows(np.concatenate([packed & 15, packed >> 4], axis=-1))


def _nibbles(packed: Bytes, size: int) -> Bytes:
    """Return rows of quanta: of each `size` bytes first the low four bits, then the high ones."""
    chunks = packed.reshape(*packed.shape[:-1], -1, 1, size)
    return _rows(chunks >> np.array([[0], [4]], dtype=np.uint8) & 15)


def _with_factors(blocks: Bytes, quanta: Bytes) -> Quanta:
    """Return the quanta of `q4_k` or `q5_k` with the factors, of six bits each, in 12 bytes.

    Four bytes have the factors of the first four scales, four bytes those of the minimums. Their
    two highest bits belong to the other factors. The last four bytes have the low four bits of
    these.
    """
    scales, minimums, rest = np.split(blocks[..., 4:16], 3, axis=-1)
    scale_factors = np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], axis=-1)
    minimum_factors = np.concatenate([minimums & 63, rest >> 4 | minimums >> 2 & 48], axis=-1)
    return Quanta(quanta, _fp16(blocks, 0), _fp16(blocks, 2), scale_factors, minimum_factors)
