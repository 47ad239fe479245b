"""`StepBuffers`: host memory that the device reads and writes while the host goes on.

Only pinned memory can be copied without waiting, and only while nobody writes to it. So a step has
buffers of its own, and two steps' buffers take turns: the scheduler fills one while the step in
flight uses the other.

    step   N  host fills A | device reads A ............ writes A | host reads A
         N+1                 host fills B |              device reads B ............
"""

from __future__ import annotations

import torch

from .stream import Event

ALIGNMENT = 16  # bytes


class StepBuffers:
    """Pinned memory for what one step sends to the device, and for what comes back.

    On a CPU there is no device to copy to: the forward reads and writes the buffer itself.
    """

    def __init__(self, device: torch.device, size: int = 1 << 16) -> None:
        self.device = device
        self.memory = self._allocate(size)
        self.used = 0  # bytes
        self.in_use: Event | None = None  # until then, by a step in flight

    def begin(self) -> None:
        """Start to fill the memory again, once the step that used it last is done with it."""
        if self.in_use is not None:
            self.in_use.wait()
        self.used, self.in_use = 0, None

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor, on the device for this step. The host does not wait."""
        staged = self._take(tensor.dtype, tensor.shape)
        staged.copy_(tensor)
        return staged.to(self.device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """The place on the host where a tensor of the device's will be. The host does not wait."""
        staged = self._take(tensor.dtype, tensor.shape)
        return staged.copy_(tensor, non_blocking=True)

    def _take(self, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """The next free piece of the memory."""
        size = dtype.itemsize * shape.numel()
        if self.used + size > len(self.memory):  # what was taken before keeps the old memory alive
            self.memory, self.used = self._allocate(2 * (self.used + size)), 0
        piece = self.memory[self.used : self.used + size]
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return piece.view(dtype).view(shape)

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
