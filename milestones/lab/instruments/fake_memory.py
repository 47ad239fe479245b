"""The memory of the fake GPU: a tensor is on it or on the host, and every access has an order.

Inside `FakeMemory(cuda).installed()`, a program with `device="cuda"` runs on a CPU, with the
streams of `fake_cuda.py`. All numbers are in the memory of the CPU, but each storage belongs to one
side. What a GPU would refuse, or do wrong now and then, is a fault at once:

- an operation with tensors of both sides;
- a wait of the host while `debug_mode` is "error", or while a graph is captured: `item`, a boolean
  index, a copy that blocks or that reads memory which is not pinned;
- two accesses to the same memory without an event or a wait between them, if one is a write;
- memory that is freed while another stream than that of its allocation may still use it, because
  the allocator would give it to the next tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .fake_cuda import FakeCuda
from .fake_operations import Calls, Operations, bytes_of, checksum, storage_key
from .fake_streams import Clock, join

HOST = "host"
MANY = 64  # accesses of a storage that are remembered without a look at them


@dataclass(frozen=True)
class Access:
    """A stream or the host has read or written some bytes of a storage, at a time of its clock."""

    start: int
    end: int
    actor: str
    time: int
    is_write: bool

    def clashes(self, other: Access, clock: Clock) -> bool:
        """Return whether this access may run at the same time as an earlier one.

        clock: of the one that does this access.
        """
        is_known = other.actor == self.actor or clock.get(other.actor, 0) >= other.time
        apart = other.end <= self.start or self.end <= other.start
        return not is_known and not apart and (self.is_write or other.is_write)

    def hides(self, other: Access) -> bool:
        """Return whether everything that clashes with an earlier access clashes with this one."""
        inside = self.start <= other.start and other.end <= self.end
        return inside and (self.is_write or (self.actor == other.actor and not other.is_write))


@dataclass
class Place:
    """What is known about a storage: its side, and the last accesses."""

    ref: StorageWeakRef
    on_gpu: bool
    is_pinned: bool
    owner: str  # the stream of its allocation
    accesses: list[Access] = field(default_factory=list)


class FakeMemory:
    """The sides of all storages, and the order of their accesses."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.faults = list[str]()
        self.places: dict[int, Place] = {}
        self.is_paused = False

    @contextmanager
    def installed(self) -> Iterator[FakeMemory]:
        """Return a context in which `device="cuda"` is this memory."""
        properties = SimpleNamespace(total_memory=2**31, name="Fake GPU")
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "device_of": lambda _: nullcontext(),
            "get_device_name": lambda device=None: "Fake GPU",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: properties,
        }
        with ExitStack() as undo:
            undo.enter_context(patch.object(self.cuda, "memory", self))
            for name, fake in fakes.items():
                undo.enter_context(patch.object(torch.cuda, name, fake))
            undo.enter_context(Operations(self))
            undo.enter_context(Calls(self))
            yield self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context without checks."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def kernel(self, args: list[Any]) -> Iterator[None]:
        """Return a context in which a Triton kernel runs. It writes the storages that change."""
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if any(not self.on_gpu(x) for x in tensors):
            self.fault("a kernel gets a tensor of the host")
        with self.paused():
            storages = {storage_key(x): x for x in tensors}
            before = {key: checksum(x) for key, x in storages.items()}
            yield
            written = [x for key, x in storages.items() if checksum(x) != before[key]]
        self.on_stream(tensors, written)

    def fault(self, text: str) -> None:
        """Note a fault, and raise it."""
        self.faults.append(text)
        raise RuntimeError(f"on a real GPU: {text}")

    def wait(self, text: str) -> None:
        """Let the host wait for the current stream."""
        if self.cuda.debug_mode == "error" or self.cuda.capture is not None:
            self.fault(f"the host waits: {text}")
        join(self.cuda.host, self.cuda.current.clock)

    def on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the GPU."""
        place = self.places.get(storage_key(tensor))
        return place is not None and place.on_gpu

    def settle(self, tensor: torch.Tensor, *, on_gpu: bool, is_pinned: bool = False) -> None:
        """Say where a new tensor is."""
        self.sweep()
        ref = StorageWeakRef(tensor.untyped_storage())
        owner = self.cuda.current.number
        self.places[storage_key(tensor)] = Place(ref, on_gpu, is_pinned, owner)

    def sweep(self) -> None:
        """Forget storages that are freed. Another stream must not be able to use them."""
        for key in [key for key, place in self.places.items() if place.ref.expired()]:
            place = self.places.pop(key)
            if not place.on_gpu:
                continue  # pinned memory: torch waits for the copies before it uses it again
            now = dict(self.cuda.host)
            join(now, self.cuda.clocks[place.owner])
            others = [use for use in place.accesses if use.actor not in (HOST, place.owner)]
            if any(now.get(use.actor, 0) < use.time for use in others):
                self.fault("memory is freed while another stream may use it")

    def on_stream(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Note the accesses of an operation on the current stream."""
        stream = self.cuda.current
        join(stream.clock, self.cuda.host)
        self._access(stream.number, stream.clock, read, written)
        if self.cuda.capture is not None:
            self.cuda.capture.accesses.append((read, written))

    def on_host(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Note the accesses of the host, to memory that a stream may use too."""
        self._access(HOST, self.cuda.host, read, written)

    def _access(
        self, actor: str, clock: Clock, read: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        time = clock[actor] = clock.get(actor, 0) + 1
        for tensor, is_write in [*((x, False) for x in read), *((x, True) for x in written)]:
            place = self.places.get(storage_key(tensor))
            if place is None or tensor.numel() == 0:
                continue
            access = Access(*bytes_of(tensor), actor, time, is_write)
            if any(access.clashes(other, clock) for other in place.accesses):
                verb = "writes" if is_write else "reads"
                self.fault(f"{actor} {verb} memory without waiting for the one that uses it")
            kept = [other for other in place.accesses if not access.hides(other)]
            place.accesses = [*(kept if len(kept) < MANY else filter(self._is_open, kept)), access]

    def _is_open(self, access: Access) -> bool:
        """Return whether a stream, or the host, does not know yet that an access is done."""
        clocks = {HOST: self.cuda.host, **self.cuda.clocks}
        return any(
            clock.get(access.actor, 0) < access.time
            for actor, clock in clocks.items() if actor != access.actor
        )  # fmt: skip

    def crossed(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        """Note a copy between the sides."""
        host = target if self.on_gpu(source) else source
        if storage_key(host) not in self.places:
            self.settle(host, on_gpu=False)
        self.on_stream([source], [target])
        if not non_blocking:
            self.wait("a copy that blocks")
        elif not self.places[storage_key(host)].is_pinned:
            self.wait("a copy of memory that is not pinned")
