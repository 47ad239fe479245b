"""`StepBuffers`: host memory that the device reads and writes while the host goes on.

A copy to the device returns without waiting only if the host memory is pinned, and it is correct
only if the host does not write to that memory in the meantime. Therefore each step in flight has
its own buffers, and two sets of buffers take turns: the scheduler fills one while the step in
flight uses the other.

    step   N  host fills A | device reads A ............ writes A | host reads A
         N+1                 host fills B |              device reads B ............
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .stream import Event

ALIGNMENT = 16  # bytes


@dataclass
class Pack:
    """Uploads that wait for one copy to the device. A copy takes the host several microseconds."""

    device: torch.device
    parts: list[list[torch.Tensor]] = field(default_factory=list)  # host memory, and its twin
    spans: list[slice] = field(default_factory=list)  # of the bytes to copy, in each part

    def twin_of(self, staged: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device that will have the content of `staged`, in `memory`."""
        start = staged.storage_offset() * staged.itemsize  # bytes
        place = slice(start, start + staged.nbytes)
        if not self.parts or self.parts[-1][0] is not memory:
            self.parts.append([memory, torch.empty_like(memory, device=self.device)])
            self.spans.append(place)
        self.spans[-1] = slice(self.spans[-1].start, place.stop)
        return self.parts[-1][1][place].view(staged.dtype).view(staged.shape)

    def send(self) -> None:
        """Start to copy everything. The host does not wait."""
        for (memory, twin), span in zip(self.parts, self.spans, strict=True):
            twin[span].copy_(memory[span], non_blocking=True)


class StepBuffers:
    """Pinned memory for the tensors that one step sends to the device and gets back.

    On a CPU there is no device to copy to. The forward reads and writes the buffer itself.
    """

    def __init__(self, device: torch.device, size: int = 1 << 16) -> None:
        self.device = device
        self._allocate(size)
        self.pack: Pack | None = None  # of the uploads to send together
        self.in_use: Event | None = None  # set when the step that uses the memory completes

    def begin(self) -> None:
        """Wait for the step that used the memory last, then start to fill it again."""
        if self.in_use is not None:
            self.in_use.wait()
        self.used, self.in_use = 0, None

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor on the device, for this step. The host does not wait."""
        staged = self._take(tensor)
        # NumPy copies on this thread. torch uses several threads above 32,768 numbers, which can
        # take milliseconds where the container may use fewer cores than the machine has.
        staged.numpy()[...] = tensor.numpy()
        if self.pack is not None:
            return self.pack.twin_of(staged, self.memory)
        return staged.to(self.device, non_blocking=True)

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Return a context at the end of which its uploads are sent, all of them in one copy."""
        self.pack = None if self.device.type == "cpu" else Pack(self.device)
        try:
            yield
            if self.pack is not None:
                self.pack.send()
        finally:
            self.pack = None

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a device tensor to the host. Return the host tensor, without waiting."""
        return self._take(tensor).copy_(tensor, non_blocking=True)

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next free piece of the memory, or of a larger one if it is full."""
        dtype, shape, size = like.dtype, like.shape, like.nbytes
        if self.used + size > self.memory.nbytes:  # earlier pieces keep the old memory alive
            self._allocate(2 * (self.used + size))
        if dtype not in self.views:
            with torch.inference_mode(False):  # it is also used outside of this mode
                self.views[dtype] = self.memory.view(dtype)
        start = self.used // dtype.itemsize
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        # One operation of torch: a slice and two views would take twice as long.
        return self.views[dtype].as_strided(shape, like.contiguous().stride(), start)

    def _allocate(self, size: int) -> None:
        size = -(-size // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):
            pinned = self.device.type == "cuda"
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.views: dict[torch.dtype, torch.Tensor] = {}  # of the memory
        self.used = 0  # bytes
