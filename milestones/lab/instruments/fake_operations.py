"""The calls of torch on the fake GPU: what they read and write, and on which side.

Two modes of torch see them. `Calls` sees the program's calls, with their devices. `Operations` sees
the operations below them, with their tensors. `memory` is a `FakeMemory`.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from .fake_cuda import WAITS

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
READERS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
ON_DATA = ("masked_select", "bincount", "unique_consecutive", "unique_dim", "allclose")
INDEXING = ("index", "index_put", "index_put_")  # indices of the host are copied, which waits
FROM_HOST = ("tensor", "as_tensor", "asarray")  # with a device, they copy numbers of Python to it


class Calls(TorchFunctionMode):
    """Answers questions about devices, and turns `cuda` into the CPU in the calls of a program."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory, kwargs, name = self.memory, dict(kwargs or {}), getattr(call, "__name__", "")
        if memory.is_paused:
            return call(*args, **kwargs)
        if name == "__get__" and call.__self__ in (torch.Tensor.device, torch.Tensor.is_cuda,
                                                   torch.Tensor.is_cpu):  # fmt: skip
            on_gpu = memory.on_gpu(args[0])
            if call.__self__ is torch.Tensor.device:
                return GPU if on_gpu else CPU
            return on_gpu == (call.__self__ is torch.Tensor.is_cuda)
        if name == "get_device":
            return 0 if memory.on_gpu(args[0]) else -1
        if name == "is_pinned":
            return (
                place := memory.places.get(storage_key(args[0]))
            ) is not None and place.is_pinned
        if name in READERS and isinstance(args[0], torch.Tensor):
            self._read(name, args[0])
        is_pinned = bool(kwargs.pop("pin_memory", False))
        target = _side(kwargs["device"]) if kwargs.get("device") is not None else None
        if target is not None:
            kwargs["device"] = CPU
        if name in ("to", "cuda", "cpu"):
            return self._moved(call, name, args, kwargs, target)
        result = call(*args, **kwargs)
        if target or is_pinned or (target is False and memory.on_gpu(result)):
            memory.settle(result, on_gpu=bool(target), is_pinned=is_pinned)
        if target:
            memory.on_stream([], [result])
            if name in FROM_HOST:
                memory.wait(f"torch.{name} copies numbers of Python")
        return result

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        """Let the host read a tensor, or write one that it gets as an array of NumPy."""
        if self.memory.on_gpu(tensor):
            if name in ("numpy", "__array__"):
                self.memory.fault("NumPy cannot read memory of a GPU")
            self.memory.wait(name)
        self.memory.on_host([tensor], [tensor] if name == "numpy" else [])

    def _moved(self, call: Any, name: str, args: Any, kwargs: Any, target: bool | None) -> Any:
        """Return the result of `Tensor.to`, `cuda` or `cpu`: perhaps a copy on the other side."""
        memory, (tensor, *rest) = self.memory, args
        target = {"cuda": True, "cpu": False}.get(name, target)
        for place, value in enumerate(rest):
            if isinstance(value, (torch.device, str)):
                target, rest[place] = _side(value), CPU
            elif isinstance(value, torch.Tensor):
                target = memory.on_gpu(value)
        before = memory.on_gpu(tensor)
        call = torch.Tensor.cpu if name == "cuda" else call
        if target is None or target == before:
            return call(tensor, *rest, **kwargs)
        with memory.paused():
            result = call(tensor, *rest, **kwargs).detach()
            result = result.clone() if storage_key(result) == storage_key(tensor) else result
        memory.settle(result, on_gpu=target)
        memory.crossed(tensor, result, bool(kwargs.get("non_blocking")))
        return result


class Operations(TorchDispatchMode):
    """Follows the operations of torch: their results are where their inputs are."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory, kwargs, name = self.memory, kwargs or {}, op.overloadpacket.__name__
        if memory.is_paused:
            return op(*args, **kwargs)
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        sides = [memory.on_gpu(x) for x in given]
        mutated = _mutated(op, args, kwargs)
        if name == "copy_" and sides[0] != sides[1] and given[1].dim() > 0:
            result = op(*args, **kwargs)
            memory.crossed(given[1], given[0], bool([*args, False][2]))
            return result
        if any(sides):
            self._check(op, name, given, sides, kwargs)
        result = op(*args, **kwargs)
        keys = {storage_key(x) for x in given}
        made = [
            x
            for x in tree_iter(result)
            if isinstance(x, torch.Tensor) and storage_key(x) not in keys
        ]
        for x in made if any(sides) else ():
            memory.settle(x, on_gpu=True)
        if made or mutated:  # otherwise it is a view
            access = memory.on_stream if any(sides) else memory.on_host
            access(given, [*mutated, *made])
        return result

    def _check(
        self, op: Any, name: str, given: list[torch.Tensor], sides: list[bool], kwargs: Any
    ) -> None:
        """Find operations on the GPU that a GPU refuses, or for which the host waits."""
        of_host = [x for side, x in zip(sides, given, strict=True) if not side and x.dim() > 0]
        if of_host and (name not in INDEXING or not sides[0]):
            self.memory.fault(f"{name} with tensors of the host and of the GPU")
        by_mask = name in INDEXING and any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        unknown_size = name == "repeat_interleave" and not kwargs.get("output_size")
        by_lengths = unknown_size and op._overloadname != "self_int"
        if name in (*WAITS, *ON_DATA) or of_host or by_mask or by_lengths:
            self.memory.wait(name)


def _mutated(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes."""
    found = list[torch.Tensor]()
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_iter(value) if isinstance(x, torch.Tensor)]
    return found


def _side(device: Any) -> bool:
    """Return whether the name of a device means the GPU."""
    return torch.device(device).type == "cuda"


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that stands for the memory of a tensor, as long as it lives."""
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last one."""
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + int(span) * tensor.itemsize


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the whole memory of a tensor."""
    with _disable_current_modes():  # a capture must not record this
        content = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        return zlib.crc32(content.numpy().data)
