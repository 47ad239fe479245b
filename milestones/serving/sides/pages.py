"""How pages get from a prefill process into the KV pool of the decode side.

`SharedMemory`: the pool is memory that both processes map, so the prefill process writes to its
place. `Rendezvous`: the pages are sent through a process group of torch (gloo; NCCL between GPUs),
and a thread of the decode side writes them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from common.parallel.ranks import open_ranks

from ...electives.disaggregated.kv_pool import KVPool
from ...electives.disaggregated.transport import Windows

ALIGNMENT = 64  # bytes: a line of a CPU's cache
DECODE, PREFILL = 0, 1  # ranks of the process group
NEVER = timedelta(days=365)  # a prefill side may have nothing to send for a long time
EVERY_WRITE = 1 << 62


@dataclass(frozen=True)
class Memory:
    """A part of shared memory that is one tensor."""

    offset: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class SharedMemory:
    """The memory of a pool in another process. fd: of the memory, and inherited by the process."""

    fd: int
    num_bytes: int
    keys: list[Memory]
    values: list[Memory]

    def open_into(self, pool: Any) -> None:
        """Set the tensors of a pool to this memory. It is freed when no process maps it."""
        memory = torch.frombuffer(mmap.mmap(self.fd, self.num_bytes), dtype=torch.uint8)

        def tensor(part: Memory) -> torch.Tensor:
            size = part.shape.numel() * part.dtype.itemsize
            return memory[part.offset : part.offset + size].view(part.dtype).view(part.shape)

        pool.keys[:] = map(tensor, self.keys)
        pool.values[:] = map(tensor, self.values)


def share(pool: KVPool) -> SharedMemory:
    """Move a pool to memory that other processes can map. What the pages hold is lost."""
    end = 0

    def part(tensor: torch.Tensor) -> Memory:
        nonlocal end
        place = Memory(end, tensor.shape, tensor.dtype)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    keys, values = list(map(part, pool.keys)), list(map(part, pool.values))
    fd = anonymous_file()
    os.ftruncate(fd, end)
    shared = SharedMemory(fd, end, keys, values)
    shared.open_into(pool)
    weakref.finalize(pool, os.close, fd)
    return shared


def anonymous_file() -> int:
    """Return a file in memory, if the system has such files, that ends with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kv-pages")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True)
class Rendezvous:
    """Where a decode side and a prefill process meet. path: of a file."""

    path: str


class PageGroup:
    """A process group of both processes. To join it takes half a minute at most."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, rank: int) -> None:
        """Raises `RuntimeError` if the other process does not come."""
        on_gpu = device.type == "cuda"
        limit = NEVER if on_gpu else None  # NCCL has one limit for all; it does not wait here
        self._group = open_ranks(device, rank, 2, rendezvous.path, limit).group
        self._limit = () if on_gpu else (NEVER,)

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor to the decode side."""
        self._group.send([tensor.contiguous()], DECODE, 0).wait(*self._limit)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for a tensor of the prefill side. Return the argument, which then has its numbers.

        Raises `RuntimeError` if the connection is closed.
        """
        self._group.recv([tensor], PREFILL, 0).wait(*self._limit)
        return tensor


class PageSender:
    """The prefill side's end of a process group."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self.group = PageGroup(rendezvous, device, PREFILL)
        self.num_writes = 0

    def write(
        self, layer: int, attempt: int, targets: list[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Send one layer of pages. keys, values: [heads, pages, page_size, D]."""
        head = torch.tensor([layer, attempt, len(targets)], device=keys.device)
        for tensor in (head, torch.tensor(targets, device=keys.device), keys, values):
            self.group.send(tensor)
        self.num_writes += 1


class PageReceiver:
    """The decode side's end: a thread that writes the pages of one prefill process.

    It writes only while the window of an attempt is open.
    """

    def __init__(
        self, rendezvous: Rendezvous, pool: KVPool, windows: Windows, on_write: Callable[[], None]
    ) -> None:
        self.rendezvous, self.pool, self.windows = rendezvous, pool, windows
        self.on_write = on_write
        self.num_writes = 0
        self.thread = threading.Thread(target=self.run, name="pages", daemon=True)
        self.thread.start()

    @torch.inference_mode()
    def run(self) -> None:
        """Write pages until the prefill process has ended."""
        device = self.pool.keys[0].device
        try:
            group = PageGroup(self.rendezvous, device, DECODE)
            while True:
                self.write(group, device)
        except RuntimeError:  # the connection is closed: its socket tells the same to the transport
            return

    def write(self, group: PageGroup, device: torch.device) -> None:
        """Wait for one layer of pages, and write it."""
        head = group.receive(torch.empty(3, dtype=torch.int64, device=device))
        layer, attempt, num_pages = head.tolist()
        targets = group.receive(torch.empty(num_pages, dtype=torch.int64, device=device))
        for pool in (self.pool.keys[layer], self.pool.values[layer]):
            heads, _, *rest = pool.shape
            pages = group.receive(pool.new_empty((heads, num_pages, *rest)))
            with self.windows.writing(attempt) as is_open:
                if is_open:
                    pool.index_copy_(1, targets, pages)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # `End` says that the pages are here
        self.num_writes += 1
        self.on_write()


def new_rendezvous() -> Rendezvous:
    """Return a place that no other pair of processes uses."""
    return Rendezvous(str(Path(tempfile.mkdtemp(prefix="ladder-pages-"), "rendezvous")))
