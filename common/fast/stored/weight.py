"""`StoredWeight`: a weight in the precision of its checkpoint, packed for the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..cpu_runtime import in_huge_pages
from .formats import (
    FORMATS,
    Bytes,
    Format,
    Quanta,
    block_bits,
    pack_floats,
    pack_quanta,
    unpack_floats,
    unpack_quanta,
)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredWeight:
    """A weight [out, in] in a format, in the layout in which the kernels read it.

    data: [panels, bytes of a panel] uint8, maybe a part of a file that is mapped into memory.
    """

    format: Format
    out: int
    inputs: int
    data: torch.Tensor

    def __post_init__(self) -> None:
        """Raise `ValueError` if `data` cannot be a weight of this format and these sizes."""
        if not self.format.is_float and self.inputs % self.format.block:
            raise ValueError(
                f"a row of {self.inputs} inputs is not a multiple of {self.format.block}, the "
                f"inputs of a block of {self.format.name}"
            )
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or not self.data.is_contiguous():
            raise ValueError(f"a stored weight must be a table of bytes, got {self.data.dtype}")

    @classmethod
    def of_quanta(cls, quanta: Quanta, format: Format, panel_size: int) -> StoredWeight:
        """Pack the scales and quanta of a weight."""
        out, inputs = quanta.quanta.shape
        return cls(format, out, inputs, _tensor(pack_quanta(quanta, format, panel_size)))

    @classmethod
    def of_floats(cls, weight: torch.Tensor, panel_size: int) -> StoredWeight:
        """Pack a weight [out, in] of 16 or 32 bits. Raises `KeyError` for another dtype."""
        format = FORMATS[NAMES[weight.dtype]]
        integers = weight.detach().view(torch.int16 if format.bits == 16 else torch.int32)
        data = _tensor(pack_floats(integers.numpy(), panel_size))
        return cls(format, weight.shape[0], weight.shape[1], data)

    @property
    def panel_size(self) -> int:
        """Return the number of outputs of a panel."""
        bits = self.inputs * block_bits(self.format) // self.format.block
        return self.data.shape[1] * 8 // bits

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that a product reads."""
        return self.data.nbytes

    def beginning(self, panels: int) -> StoredWeight:
        """Return the weight of the first outputs, as many as there are in some panels."""
        size = self.panel_size
        return replace(self, out=min(self.out, panels * size), data=self.data[:panels])

    def dequantize(self) -> torch.Tensor:
        """Return the weight as float32, [out, in]."""
        panels: Bytes = self.data.numpy()
        if self.format.is_float:
            integers = unpack_floats(panels, f"i{self.format.bits // 8}", self.out, self.inputs)
            return torch.from_numpy(integers).view(DTYPES[self.format.name]).float()
        quanta = unpack_quanta(panels, self.format, self.out, self.inputs)
        return torch.from_numpy(quanta.dequantize(self.format))


def _tensor(data: Bytes) -> torch.Tensor:
    """Return a copy of data in memory that begins at a cache line, in huge pages if possible."""
    return in_huge_pages(torch.empty(data.shape, dtype=torch.uint8)).copy_(torch.from_numpy(data))
