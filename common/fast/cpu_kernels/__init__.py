"""Kernels in C for float32 on a CPU, compiled on the machine that runs them.

Weights stay in the precision of their checkpoint (`stored/`); everything else is float32.

`kernels()` returns them, or None if the machine has no C compiler. The callers then use operations
of torch instead. Data that is the same in all layers of a forward is checked once and passed as a
structure (`structs.py`). A layer makes only a few calls of C. The overhead of these calls is what
takes time outside of C, so the Python code of a call must be short.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..cpu_runtime import let_waiting_threads_sleep
from ..stored.weight import StoredWeight
from .build import load_library
from .rows import SIGNATURES, RowKernels
from .space import SPACE
from .structs import (
    POINTER,
    SIZE,
    BatchLayout,
    Heads,
    Layer,
    Layers,
    Linear,
    Memory,
    Weight,
    checked,
)  # fmt: skip

__all__ = ["BatchLayout", "Heads", "Kernels", "Layer", "Layers", "Linear", "bind", "kernels"]


@dataclass(frozen=True)
class Kernels(RowKernels):
    """The compiled functions, and the constants of their C code."""

    panel_size: int  # the number of outputs of a linear layer that are computed together
    split_size: int  # the number of tokens in a part of a context
    block_size: int  # the number of tokens that attention computes at the same time

    def require_layout(self, stored: StoredWeight) -> None:
        """Raise `ValueError` unless a weight has the layout that these kernels read."""
        panels = -(-stored.out // self.panel_size)
        size = self.library.stored_bytes(stored.format.number, stored.inputs)
        if stored.data.shape != (panels, size):
            raise ValueError(
                f"{stored.format.name} [{stored.out}, {stored.inputs}] needs {panels} panels of "
                f"{size} bytes, got {tuple(stored.data.shape)}"
            )

    def take_rows(self, ids: torch.Tensor, stored: StoredWeight) -> torch.Tensor:
        """Return rows of a weight as float32, [..., in], for an embedding. ids: int64.

        Raises `IndexError` if an id is not a row of the weight.
        """
        if ids.dtype != torch.int64 or not ids.is_cpu:
            raise TypeError(f"ids must be int64 on a CPU, got {ids.dtype} on {ids.device}")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < stored.out:
            raise IndexError(f"ids must be in [0, {stored.out}), got {ids.min()} to {ids.max()}")
        ids = ids.contiguous()
        rows = torch.empty((*ids.shape, stored.inputs))
        self.library.take_rows(
            ctypes.byref(Weight.of(stored)), stored.inputs, ids.data_ptr(), ids.numel(),
            rows.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return rows

    def linear(
        self, x: torch.Tensor, linear: Linear, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply a linear layer to x, [..., in]. Returns [..., out], with `add` [..., out] added.

        The bits of a row do not depend on the number of rows.
        """
        x = checked(x).contiguous()
        if x.shape[-1] != linear.in_features:
            raise ValueError(f"the last dimension must be {linear.in_features}, got {x.shape[-1]}")
        out = x.new_empty((*x.shape[:-1], linear.out))
        if add is not None and checked(add := add.contiguous()).shape != out.shape:
            raise ValueError(f"add has shape {tuple(add.shape)}, but out {tuple(out.shape)}")
        self.library.linear(
            ctypes.byref(linear), x.data_ptr(), None if add is None else add.data_ptr(),
            out.data_ptr(), out.numel() // linear.out, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def before_attention(self, layer: Layer, x: torch.Tensor, heads: Heads) -> None:
        """Compute q, k and v of a layer and write them to `heads`. x: [B, T, hidden]."""
        x = checked(x).contiguous()
        if x.shape != (*heads.tokens, layer.hidden) or heads.sizes != layer.sizes:
            raise ValueError(
                f"x {tuple(x.shape)} does not fit heads for {tuple(heads.tokens)} tokens"
            )
        self.library.before_attention(
            layer.address, heads.address, x.data_ptr(), SPACE.take(x.numel()),
            torch.get_num_threads(),
        )  # fmt: skip

    def after_attention(
        self, layer: Layer, attended: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output of a layer, [B, T, hidden], from the output of its attention.

        attended: [B, T, heads, head_dim]; x: [B, T, hidden], the input of the layer.
        """
        x, attended = checked(x).contiguous(), checked(attended).contiguous()
        batch, num_tokens, hidden = x.shape
        rows = batch * num_tokens
        if hidden != layer.hidden or attended.numel() != rows * layer.attended:
            raise ValueError(f"attended {tuple(attended.shape)} does not fit x {tuple(x.shape)}")
        out = x.new_empty(x.shape)
        self.library.after_attention(
            layer.address, attended.data_ptr(), x.data_ptr(), SPACE.take(rows * layer.space),
            out.data_ptr(), rows, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def decode_layers(
        self, layers: Layers, x: torch.Tensor, heads: Heads, requests: BatchLayout, scale: float
    ) -> torch.Tensor:
        """Compute the layers of a decode step. x: [1, T, hidden], one token of each request.

        Returns the output of the last layer, in the same shape.
        """
        out = checked(x).clone(memory_format=torch.contiguous_format)
        first, rows = layers.first, requests.count
        if x.shape != (1, rows, first.hidden) or (*heads.tokens, requests.tokens) != (
            1,
            rows,
            rows,
        ):
            raise ValueError(f"x {tuple(x.shape)} is not one token of each of {rows} requests")
        splits, dim = requests.splits_of(self.split_size, layers.page_size), heads.sizes[-1]
        lines = min(rows, self.block_size) * heads.sizes[0] * splits
        attended = SPACE.take(rows * (first.attended + first.space) + lines * (dim + 2))
        space = attended + 4 * rows * first.attended
        parts = space + 4 * rows * first.space
        self.library.decode_layers(
            layers.layers, layers.memories, len(layers.layers), heads.address, requests.address,
            out.data_ptr(), attended, space, parts, parts + 4 * lines * dim, splits, scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def store_kv(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        requests: BatchLayout,
    ) -> None:
        """Write key and value, [T, kv_heads, head_dim], to their slots in the memory of a layer.

        keys, values: [kv_heads, pages, page_size, head_dim].
        """
        memory = Memory.of(keys, values)
        tokens, kv_heads = requests.tokens, memory.kv_heads
        if key.shape != (tokens, kv_heads, memory.key_dim):
            raise ValueError(f"{tuple(key.shape)} are not the keys of {tokens} tokens")
        if value.shape != (tokens, kv_heads, memory.value_dim):
            raise ValueError(f"{tuple(value.shape)} are not the values of {tokens} tokens")
        key, value = _heads_of(key), _heads_of(value)
        key_token, key_head, _ = key.stride()
        value_token, value_head, _ = value.stride()
        self.library.store_kv(
            ctypes.byref(memory), key.data_ptr(), key_token, key_head, value.data_ptr(),
            value_token, value_head, requests.slots, tokens,
        )  # fmt: skip

    def paged_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        requests: BatchLayout,
        first: int,
        count: int,
        scale: float,
    ) -> torch.Tensor:
        """Compute causal attention for `count` requests, from request `first` on.

        query: [T, heads, head_dim], the queries of these requests, one request after the other.
        Each query attends to the tokens of its request up to its own position. keys, values:
        [kv_heads, pages, page_size, head_dim]. Returns [T, heads, head_dim].
        """
        memory = Memory.of(keys, values)
        tokens, heads, dim = query.shape
        if dim != memory.key_dim or not 0 <= first <= first + count <= requests.count:
            raise ValueError(
                f"queries {tuple(query.shape)} of {count} requests from {first} on, for keys of "
                f"{memory.key_dim} and {requests.count} requests"
            )
        query = _heads_of(query)
        query_token, query_head, _ = query.stride()
        splits = requests.splits_of(self.split_size, memory.page_size)
        lines = min(tokens, self.block_size) * heads * splits
        parts = SPACE.take(lines * (memory.value_dim + 2))
        softmax = parts + 4 * lines * memory.value_dim
        output = query.new_empty((tokens, heads, memory.value_dim))
        self.library.paged_attention(
            ctypes.byref(memory), requests.address, first, count, query.data_ptr(), query_token,
            query_head, parts, softmax, output.data_ptr(), heads, splits, scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return output


def _heads_of(x: torch.Tensor) -> torch.Tensor:
    """Return x, [T, heads, head_dim], such that the numbers of each head are contiguous."""
    return x if checked(x).stride(-1) == 1 else x.contiguous()


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels for this machine; None if they cannot be compiled."""
    if (library := load_library()) is None:
        return None
    let_waiting_threads_sleep()
    return bind(library)


def bind(library: ctypes.CDLL) -> Kernels:
    """Return the functions of a compiled library, with their C signatures."""
    signatures: dict[str, tuple[Any, ...]] = {
        **SIGNATURES,
        "take_rows": (POINTER, SIZE, POINTER, SIZE, POINTER, ctypes.c_int),
        "linear": (*[POINTER] * 4, SIZE, ctypes.c_int),
        "before_attention": (*[POINTER] * 4, ctypes.c_int),
        "after_attention": (*[POINTER] * 5, SIZE, ctypes.c_int),
        "decode_layers": (
            *[POINTER] * 2, SIZE, *[POINTER] * 7, SIZE, ctypes.c_float, ctypes.c_int,
        ),
        "store_kv": (*[POINTER] * 2, *[SIZE] * 2, POINTER, *[SIZE] * 2, POINTER, SIZE),
        "paged_attention": (
            *[POINTER] * 2,
            *[SIZE] * 2,
            POINTER,
            *[SIZE] * 2,
            *[POINTER] * 3,
            *[SIZE] * 2,
            ctypes.c_float,
            ctypes.c_int,
        ),
    }  # fmt: skip
    library.stored_bytes.argtypes, library.stored_bytes.restype = (SIZE, SIZE), SIZE
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return Kernels(library, library.panel_size(), library.split_size(), library.block_size())
