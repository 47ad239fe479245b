"""A fake of `torch.cuda` on a CPU: it records the calls, and replays graphs of tensor operations.

Inside `FakeCuda().installed()`, streams, events and graphs are those of this file. Work runs at
once, in the order of the calls. `calls` has what was called, and on which stream. Captures follow
CUDA's rules: a capture that waits for the device, or during which a graph is destroyed, fails. A
graph has recorded the operations of torch and the interpreted Triton kernels. A replay runs them on
the same memory. Before that, the memory of the other graphs of the pool is filled with NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from .fake_streams import Clock, FakeEvent, FakeStream, join

CAPTURING = "operation not permitted when stream is capturing"
WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "is_nonzero", "equal")  # wait for the device
POISON = {torch.bool: True, torch.int64: -(2**40), torch.int32: -(2**30)}


class FakeCuda:
    """A device without hardware. Its clock goes on only if a test advances `now`, in seconds."""

    def __init__(self, free_bytes: int = 2**30) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.now = 0.0
        self.free_bytes = free_bytes  # free for the process, without the cache of torch
        self.cached_bytes = 0  # held by torch, and not used by any tensor
        self.debug_mode: int | str = 0
        self.capture: FakeGraph | None = None
        self.memory: Any = None  # a `FakeMemory`, which follows the accesses to memory
        self.host: Clock = {}
        self.clocks: dict[str, Clock] = {}  # of the streams
        self.main = FakeStream(self, "main")
        self.current = self.main
        self.graphs: WeakSet[FakeGraph] = WeakSet()

    def record(self, *call: str) -> None:
        self.calls.append(call)

    def names(self) -> list[str]:
        """Return the calls as text, in order."""
        return [" ".join(call) for call in self.calls]

    def ordered(self, clock: Clock, other: Clock) -> None:
        """Let a stream or the host wait for another one."""
        if self.memory is not None:
            self.memory.sweep()  # before the wait: what is freed by now, is freed without it
        join(clock, other)

    def refuse_while_capturing(self) -> None:
        if self.capture is not None:
            raise RuntimeError(f"CUDA error: {CAPTURING}")

    @contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """Return a context in which `torch.cuda` is this device."""
        fakes: dict[str, Any] = {
            "is_initialized": lambda: True,
            "Stream": self._new_stream,
            "Event": lambda enable_timing=False: FakeEvent(self),
            "CUDAGraph": lambda: FakeGraph(self),
            "stream": self._on,
            "graph": self._capturing,
            "current_stream": lambda device=None: self.current,
            "graph_pool_handle": lambda: (0, 1),
            "synchronize": self._synchronize,
            "mem_get_info": lambda device=None: (self.free_bytes, 2**31),
            "empty_cache": self._empty_cache,
            "device": self._on_device,
            "get_sync_debug_mode": lambda: self.debug_mode,
            "set_sync_debug_mode": self._set_debug_mode,
        }
        with ExitStack() as undo:
            undo.enter_context(_Watch(self))
            for name, fake in fakes.items():
                undo.enter_context(patch.object(torch.cuda, name, fake))
            undo.enter_context(_kernels_recorded(self))
            yield self

    def _new_stream(self, device: Any = None) -> FakeStream:
        self.record("new stream")
        return FakeStream(self, "side")

    def _set_debug_mode(self, mode: int | str) -> None:
        if "warned" not in self.names():  # torch warns once in a process
            self.record("warned")
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        self.debug_mode = mode

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _on_device(self, device: Any) -> Iterator[None]:
        self.record("device", str(device))
        yield

    @contextmanager
    def _capturing(self, graph: FakeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        self._synchronize()
        stream = stream or FakeStream(self, "capture")
        if stream is self.main:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.record("capture")
        self.capture = graph
        try:
            with self._on(stream):
                yield
        finally:
            self.capture = None
        if graph.broken:
            raise RuntimeError(f"CUDA error: {CAPTURING}")

    def _synchronize(self, device: Any = None) -> None:
        self.refuse_while_capturing()
        self.record("synchronize", "device")
        for clock in self.clocks.values():
            self.ordered(self.host, clock)

    def _empty_cache(self) -> None:
        self.refuse_while_capturing()
        self.free_bytes, self.cached_bytes = self.free_bytes + self.cached_bytes, 0


@dataclass(eq=False)
class FakeGraph:
    """The operations of a capture, and the memory that they write."""

    cuda: FakeCuda
    operations: list[Callable[[], None]] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    accesses: list[Any] = field(default_factory=list)  # the arguments of `FakeMemory.on_stream`
    broken: bool = False

    def __post_init__(self) -> None:
        self.cuda.graphs.add(self)

    def replay(self) -> None:
        self.cuda.refuse_while_capturing()
        self.cuda.record("replay", self.cuda.current.name)
        for tensor in (x for graph in self.cuda.graphs if graph is not self for x in graph.memory):
            tensor.fill_(POISON.get(tensor.dtype, torch.nan if tensor.is_floating_point() else 0))
        with self.cuda.memory.paused() if self.cuda.memory else nullcontext():
            for operation in self.operations:
                operation()
        for access in self.accesses:
            self.cuda.memory.on_stream(*access)

    def __del__(self) -> None:
        if self.cuda.capture is not None:  # its memory would be freed in the middle of the capture
            self.cuda.capture.broken = True


class _Watch(TorchDispatchMode):
    """Records the operations of torch during a capture, and refuses those that wait."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, graph = kwargs or {}, self.cuda.capture
        if op.overloadpacket.__name__ in WAITS and self.cuda.memory is None:
            if self.cuda.debug_mode == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
            self.cuda.refuse_while_capturing()
        if graph is None:
            return op(*args, **kwargs)
        result = op(*args, **kwargs)
        given = {_address(x) for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_iter(result) if isinstance(x, torch.Tensor)]
        fresh = [_address(x) not in given for x in made]

        def again() -> None:
            results = [x for x in tree_iter(op(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for old, new, is_fresh in zip(made, results, fresh, strict=True):
                if is_fresh:
                    old.copy_(new)

        graph.operations.append(again)
        graph.memory += [x for x, is_fresh in zip(made, fresh, strict=True) if is_fresh]
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _kernels_recorded(cuda: FakeCuda) -> Iterator[None]:
    """Record the launches of interpreted Triton kernels too, if this machine has Triton."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    executor: Any = getattr(interpreter, "GridExecutor", SimpleNamespace(__call__=None))
    run = executor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        memory = cuda.memory
        tensors = [*args, *kwargs.values()]
        with memory.kernel(tensors) if memory else nullcontext(), _disable_current_modes():
            run(self, *args, **kwargs)
        if cuda.capture is not None:
            cuda.capture.operations.append(lambda: recorded(self, *args, **kwargs))

    with patch.object(executor, "__call__", recorded):
        yield
