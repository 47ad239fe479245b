"""A call of the model as bytes and integers, so that every rank makes the same call.

Rank 0 calls the model with tensors, a KV pool, and a module of kernels. The other ranks get

- the content of all tensors in one broadcast of integers. On a GPU they go from device to device,
  and the host does not wait for them;
- the number of the KV pool. Each rank has a pool of its own, with the same pages, for its own
  heads. The first call with a pool also brings the shapes of its tensors;
- everything else as a pickle: numbers on the host, and the names of functions and modules.
"""

from __future__ import annotations

import importlib
import io
import pickle
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

# Other arguments, such as a cache of Hugging Face, have state that the ranks would not share.
ARGUMENTS = {"input_ids", "position_ids", "use_cache", "logits_to_keep", "paged"}


@dataclass
class Call:
    """What the other ranks need for one call of the model, except the content of its tensors."""

    attention: str  # the name of the attention function in Hugging Face's registry
    arguments: bytes
    shapes: list[tuple[torch.dtype, torch.Size]]  # of the tensors in the broadcast
    dropped: list[int]  # numbers of pools that no longer exist


class Sender:
    """The side of rank 0: converts calls of the model to `Call`s."""

    def __init__(self) -> None:
        self.numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of the KV pools
        self.known: set[int] = set()  # pools that the other ranks have
        self.count = 0

    def pack(
        self, attention: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, torch.Tensor]:
        """Return a call, and the content of its tensors: [N] int64.

        Raises `ValueError` for an argument that cannot be sent.
        """
        if unknown := sorted(kwargs.keys() - ARGUMENTS):
            raise ValueError(f"with tensor_parallel_size > 1 the model does not accept {unknown}")
        dropped = self.known - {*self.numbers.values()}
        self.known -= dropped
        file = io.BytesIO()
        pickler = _Pickler(file, self, getattr(kwargs.get("paged"), "pool", None))
        pickler.dump((args, kwargs))
        shapes = [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]
        content = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in pickler.tensors])
        return Call(attention, file.getvalue(), shapes, sorted(dropped)), content

    def describe(self, pool: Any) -> tuple[int, type[Any], dict[str, Any] | None]:
        """Return the number and the class of a pool, and its attributes if it is new.

        The attributes have shapes in place of tensors.
        """
        if pool not in self.numbers:
            self.count += 1
            self.numbers[pool] = self.count
        number = self.numbers[pool]
        is_new = number not in self.known
        self.known.add(number)
        return number, type(pool), _shapes_of(vars(pool)) if is_new else None


class Receiver:
    """The side of the other ranks: converts `Call`s to arguments of the model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pools: dict[int, Any] = {}  # KV pools by their numbers

    def empty_content(self, call: Call) -> torch.Tensor:
        """Return memory for the content of the tensors of a call: [N] int64."""
        total = sum(shape.numel() for _, shape in call.shapes)
        return torch.empty(total, dtype=torch.int64, device=self.device)

    def unpack(self, call: Call, content: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call: positional and by keyword."""
        for number in call.dropped:
            self.pools.pop(number, None)
        parts = content.split([shape.numel() for _, shape in call.shapes])
        tensors = [
            part.to(dtype).view(shape)
            for part, (dtype, shape) in zip(parts, call.shapes, strict=True)
        ]
        arguments: tuple[tuple[Any, ...], dict[str, Any]]
        arguments = _Unpickler(io.BytesIO(call.arguments), self, tensors).load()
        return arguments

    def pool(self, number: int, kind: type[Any], attributes: dict[str, Any] | None) -> Any:
        """Return the pool of this rank with a number. A new one is allocated."""
        if attributes is not None:
            pool: Any = object.__new__(kind)
            vars(pool).update(_allocated(attributes, self.device))
            self.pools[number] = pool
        return self.pools[number]


class _Pickler(pickle.Pickler):
    """Replaces tensors, the KV pool, and modules by names."""

    def __init__(self, file: io.BytesIO, sender: Sender, pool: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.sender, self.of_step = sender, pool
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, thing: Any) -> tuple[str, Any] | None:
        if isinstance(thing, torch.Tensor):
            if thing.is_floating_point():
                raise ValueError("with tensor_parallel_size > 1 only integer tensors can be sent")
            self.tensors.append(thing)
            return "tensor", len(self.tensors) - 1
        if thing is not None and thing is self.of_step:
            return "pool", self.sender.describe(thing)
        if isinstance(thing, ModuleType):
            return "module", thing.__name__
        return None


class _Unpickler(pickle.Unpickler):
    """Replaces the names by the tensors, the KV pool, and the modules of this rank."""

    def __init__(self, file: io.BytesIO, receiver: Receiver, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.receiver, self.tensors = receiver, tensors

    def persistent_load(self, name: Any) -> Any:
        kind, value = name
        if kind == "tensor":
            return self.tensors[value]
        if kind == "pool":
            return self.receiver.pool(*value)
        return importlib.import_module(value)


def _shapes_of(value: Any) -> Any:
    """Return a copy of lists and dicts, with `_Empty` in place of the tensors in them."""
    if isinstance(value, torch.Tensor):
        return _Empty(value.dtype, value.shape)
    if isinstance(value, list):
        return [_shapes_of(item) for item in value]
    if isinstance(value, dict):
        return {key: _shapes_of(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class _Empty:
    """Stands for a tensor. Its content is not sent."""

    dtype: torch.dtype
    shape: torch.Size


def _allocated(value: Any, device: torch.device) -> Any:
    """Return the reverse of `_shapes_of`, with new tensors that have no content."""
    if isinstance(value, _Empty):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, list):
        return [_allocated(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _allocated(item, device) for key, item in value.items()}
    return value
