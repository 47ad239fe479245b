"""`StepBuffers`: host memory that the device reads and writes while the host goes on.

A copy to the device returns without waiting only if the host memory is pinned, and it is correct
only if the host does not write to that memory in the meantime. Therefore each step in flight has
its own buffers, and two sets of buffers take turns: the scheduler fills one while the step in
flight uses the other.

    step   N  host fills A | device reads A ............ writes A | host reads A
         N+1                 host fills B |              device reads B ............
"""

from __future__ import annotations

import torch

from .stream import Event

ALIGNMENT = 16  # bytes


class StepBuffers:
    """Pinned memory for the tensors that one step sends to the device and gets back.

    On a CPU there is no device to copy to. The forward reads and writes the buffer itself.
    """

    def __init__(self, device: torch.device, size: int = 1 << 16) -> None:
        self.device = device
        self.memory = self._allocate(size)
        self.used = 0  # bytes
        self.in_use: Event | None = None  # set when the step that uses the memory completes

    def begin(self) -> None:
        """Wait for the step that used the memory last, then start to fill it again."""
        if self.in_use is not None:
            self.in_use.wait()
        self.used, self.in_use = 0, None

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor on the device, for this step. The host does not wait."""
        staged = self._take(tensor.dtype, tensor.shape)
        staged.copy_(tensor)
        return staged.to(self.device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a device tensor to the host. Return the host tensor, without waiting."""
        staged = self._take(tensor.dtype, tensor.shape)
        return staged.copy_(tensor, non_blocking=True)

    def _take(self, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return the next free piece of the memory, or of a larger one if it is full."""
        size = dtype.itemsize * shape.numel()
        if self.used + size > self.memory.nbytes:  # earlier pieces keep the old memory alive
            self.memory, self.used = self._allocate(2 * (self.used + size)), 0
        piece = self.memory[self.used : self.used + size]
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return piece.view(dtype).view(shape)

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
