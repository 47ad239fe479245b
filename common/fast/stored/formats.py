"""The formats in which the kernels read a weight, and the layout of each in memory.

`cpu_kernels/format.h` describes the layout, and has the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[Any]  # of uint8
ZERO_FACTOR = 128  # a signed factor of a scale is stored as a byte, with this number added


@dataclass(frozen=True)
class Format:
    """A format: floats of 16 or 32 bits, or integers of a few bits ("quanta") with scales.

    bits: of a quantum or a float. zero: the quantum of the weight 0. minimum: whether a minimum is
    added to the weights. inputs: the inputs of a group, which share a scale. groups: the groups of
    a block. If a block has several, its scales are shared, and each group has factors of them.
    """

    name: str
    number: int
    bits: int
    zero: int = 0
    minimum: bool = False
    inputs: int = 32
    groups: int = 1

    @property
    def is_float(self) -> bool:
        """Return whether the weights are floats, without scales."""
        return self.bits >= 16

    @property
    def block(self) -> int:
        """Return the number of inputs of a block."""
        return self.inputs * self.groups


FORMATS = {
    format.name: format
    for format in (
        Format("F32", 0, bits=32),
        Format("F16", 1, bits=16),
        Format("BF16", 2, bits=16),
        Format("Q4_0", 3, bits=4, zero=8),
        Format("Q4_1", 4, bits=4, minimum=True),
        Format("Q5_0", 5, bits=5, zero=16),
        Format("Q5_1", 6, bits=5, minimum=True),
        Format("Q8_0", 7, bits=8, zero=128),
        Format("Q4_K", 8, bits=4, minimum=True, groups=8),
        Format("Q5_K", 9, bits=5, minimum=True, groups=8),
        Format("Q6_K", 10, bits=6, zero=32, inputs=16, groups=16),
    )
}


@dataclass(frozen=True)
class Quanta:
    """A weight [out, in] as scales, minimums and quanta.

    quanta: [out, in] bytes; scales, minimums: [out, blocks] float16; factors of the scales and of
    the minimums: [out, blocks, groups] bytes, for a format with several groups in a block. None is
    what the format does not have.
    """

    quanta: Bytes
    scales: NDArray[np.float16]
    minimums: NDArray[np.float16] | None = None
    scale_factors: Bytes | None = None
    minimum_factors: Bytes | None = None

    def dequantize(self, format: Format) -> NDArray[np.float32]:
        """Return the weight, [out, in], computed with the operations of the kernels."""
        outputs, inputs = self.quanta.shape
        scales = _spread(self.scales, self.scale_factors, ZERO_FACTOR if format.zero else 0)
        quanta = self.quanta.reshape(outputs, -1, format.groups, format.inputs).astype(np.float32)
        weight = scales * (quanta - np.float32(format.zero))
        if self.minimums is not None:
            minimums = _spread(self.minimums, self.minimum_factors, 0)
            weight += minimums if self.minimum_factors is None else -minimums
        return weight.reshape(outputs, inputs)


def _spread(numbers: NDArray[np.float16], factors: Bytes | None, zero: int) -> NDArray[np.float32]:
    """Return scales or minimums for each group, [out, blocks, groups, 1]."""
    spread = numbers.astype(np.float32)[..., None, None]
    if factors is not None:
        spread = spread * (factors.astype(np.float32) - np.float32(zero))[..., None]
    return spread


def pack_quanta(quanta: Quanta, format: Format, panel_size: int) -> Bytes:
    """Lay out a weight [out, in] as the kernels read it: [panels, bytes of a panel].

    The last panel is padded with zeros.
    """
    headers = [_in_panels(x, panel_size) for x in (quanta.scales, quanta.minimums) if x is not None]
    factors = (quanta.scale_factors, quanta.minimum_factors)
    parts = [_in_panels(factor, panel_size) for factor in factors if factor is not None]
    grouped = quanta.quanta.reshape(len(quanta.quanta), -1, format.groups, format.inputs)
    planes = _planes(_in_panels(grouped, panel_size), format)
    parts += [plane.reshape(*plane.shape[:3], -1) for plane in planes]
    groups = np.concatenate(parts, axis=-1)
    groups = groups.reshape(*groups.shape[:2], -1)
    blocks = np.concatenate([*(header.view(np.uint8) for header in headers), groups], axis=-1)
    return blocks.reshape(len(blocks), -1)


def unpack_quanta(panels: Bytes, format: Format, outputs: int, inputs: int) -> Quanta:
    """Return the scales and quanta of a packed weight [outputs, inputs]: undo `pack_quanta`."""
    blocks = panels.reshape(len(panels), inputs // format.block, -1)
    size = blocks.shape[-1] * 8 // block_bits(format)
    kinds = 2 if format.minimum else 1
    header, rest = np.split(blocks, [2 * size * kinds], axis=-1)
    numbers = header.view(np.float16).reshape(*header.shape[:2], kinds, size)
    groups = rest.reshape(*rest.shape[:2], format.groups, -1)
    factors, planes = np.split(groups, [size * kinds if format.groups > 1 else 0], axis=-1)
    factors = factors.reshape(*factors.shape[:3], -1, size)
    found: list[Any] = [_in_rows(numbers[:, :, i], outputs) for i in range(kinds)]
    found += [None] * (2 - kinds)
    found += [_in_rows(factors[..., i, :], outputs) for i in range(factors.shape[-2])]
    quanta = _in_rows(_quanta(planes, format, size), outputs).reshape(outputs, inputs)
    return Quanta(quanta, *found)


def pack_floats(weight: NDArray[Any], panel_size: int) -> Bytes:
    """Lay out floats of 16 or 32 bits, [out, in], like `pack_quanta`."""
    panels = _in_panels(weight, panel_size)
    return panels.reshape(len(panels), -1).view(np.uint8)


def unpack_floats(panels: Bytes, dtype: Any, outputs: int, inputs: int) -> NDArray[Any]:
    """Return a weight of floats, [outputs, inputs]: undo `pack_floats`."""
    return _in_rows(panels.view(dtype).reshape(len(panels), inputs, -1), outputs)


def _in_panels(x: NDArray[Any], size: int) -> NDArray[Any]:
    """Return x, [out, ...], as panels [panels, ..., size], padded with zeros."""
    padding = [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1)
    panels = np.pad(x, padding).reshape(-1, size, *x.shape[1:])
    return np.ascontiguousarray(np.moveaxis(panels, 1, -1))


def _in_rows(panels: NDArray[Any], outputs: int) -> NDArray[Any]:
    """Return panels, [panels, ..., size], as rows [outputs, ...]: undo `_in_panels`."""
    rows = np.moveaxis(panels, -1, 1)
    return np.ascontiguousarray(rows.reshape(-1, *panels.shape[1:-1])[:outputs])


def block_bits(format: Format) -> int:
    """Return the number of bits of a block that belong to one output."""
    if format.is_float:
        return format.bits * format.block
    kinds = 2 if format.minimum else 1
    factors = 8 * kinds * format.groups if format.groups > 1 else 0
    return 16 * kinds + factors + format.bits * format.block


def _planes(quanta: Bytes, format: Format) -> list[Bytes]:
    """Return the planes of quanta, [..., inputs, size]: bits of several quanta in each byte."""
    if format.bits == 8:
        return [quanta]
    planes: list[Bytes] = [quanta[..., 0::2, :] & 15 | quanta[..., 1::2, :] << 4]
    high = quanta >> 4
    if format.bits == 5:
        planes.append(np.packbits(high, axis=-1, bitorder="little"))
    if format.bits == 6:
        planes.append(np.bitwise_or.reduce([high[..., i::4, :] << 2 * i for i in range(4)]))
    return planes


def _quanta(planes: Bytes, format: Format, size: int) -> Bytes:
    """Return quanta [..., inputs, size] from the bytes of their planes: undo `_planes`."""
    shape = *planes.shape[:-1], -1, size
    if format.bits == 8:
        return planes.reshape(shape)
    low, high = np.split(planes, [format.inputs * size // 2], axis=-1)
    quanta = _interleaved(low.reshape(shape), 4)
    if format.bits == 5:
        quanta |= np.unpackbits(high, axis=-1, bitorder="little").reshape(shape) << 4
    if format.bits == 6:
        quanta |= _interleaved(high.reshape(shape), 2) << 4
    return quanta


def _interleaved(plane: Bytes, bits: int) -> Bytes:
    """Return the quanta of a plane, [..., lines, size], with several quanta in each byte."""
    parts = [plane >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-2).reshape(*plane.shape[:-2], -1, plane.shape[-1])
