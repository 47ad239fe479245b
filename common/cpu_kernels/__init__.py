"""Kernels in C for float32 on a CPU, compiled on the machine they run on.

`kernels()` gives them, or None where there is no C compiler; torch's operations do the same then.
C takes addresses for what they are said to be: whatever comes from outside is checked before.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..cpu_runtime import in_huge_pages
from .build import load_library

POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64


class Linear(ctypes.Structure):
    """A weight as `linear.c` reads it. Whoever makes one keeps the tensors."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("in_features", SIZE), ("out", SIZE))

    @classmethod
    def of(cls, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> Linear:
        """packed: [panels, in, panel_size], from `Kernels.pack`; bias: [out]."""
        pointer = None if bias is None else bias.data_ptr()
        return cls(packed.data_ptr(), pointer, packed.shape[1], out_features)


class Layer(ctypes.Structure):
    """What `layer.c` knows of a decoder layer."""

    _fields_ = (
        ("input_norm", POINTER), ("mlp_norm", POINTER), ("q_norm", POINTER), ("k_norm", POINTER),
        ("epsilon", ctypes.c_double), ("heads", SIZE), ("kv_heads", SIZE), ("head_dim", SIZE),
        ("qkv", Linear), ("output", Linear), ("gate_up", Linear), ("down", Linear),
    )  # fmt: skip


class Memory(ctypes.Structure):
    """Keys and values of a layer, as `attention.c` knows them."""

    _fields_ = (
        ("keys", POINTER), ("values", POINTER), ("kv_heads", SIZE), ("slots", SIZE),
        ("page_size", SIZE), ("key_dim", SIZE), ("value_dim", SIZE),
    )  # fmt: skip

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Memory:
        """keys, values: [kv_heads, pages, page_size, head_dim]."""
        kv_heads, pages, page_size, key_dim = keys.shape
        return cls(
            keys.data_ptr(), values.data_ptr(), kv_heads, pages * page_size, page_size, key_dim,
            values.shape[-1],
        )  # fmt: skip


class Space(threading.local):
    """Memory for what a kernel computes on the way, one for each thread, kept from call to call:
    new memory comes page by page from the system, zeroed, which takes longer than using it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def take(self, count: int) -> int:
        """The address of `count` float32 numbers, good until the thread's next call."""
        if len(self.memory) < count:
            self.memory = torch.empty(count)
        return self.memory.data_ptr()


SPACE = Space()


@dataclass(frozen=True)
class Kernels:
    """The compiled functions."""

    library: ctypes.CDLL
    panel_size: int  # outputs of a linear that are computed together
    split_size: int  # tokens of a context that are read together
    block_size: int  # queries that are computed at the same time

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: [out, in]. Returns [panels, in, panel_size], filled up with zeros."""
        padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % self.panel_size))
        panels = padded.view(-1, self.panel_size, weight.shape[1]).transpose(1, 2)
        packed = torch.empty(panels.shape, dtype=panels.dtype)
        return in_huge_pages(packed).copy_(panels)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]: each row the same bits, however many there are."""
        x = _ready(x, linear.in_features)
        out = x.new_empty((*x.shape[:-1], linear.out))
        self.library.linear_alone(
            ctypes.byref(linear), x.data_ptr(), out.data_ptr(), out.numel() // linear.out,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def before_attention(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> torch.Tensor:
        """q, k and v of a layer, q and k turned.

        x: [B, T, hidden]; cos, signed_sin (negative in the first half): [B, T, 1, head_dim].
        Returns [B, T, heads + 2 * kv_heads, head_dim].
        """
        x = _ready(x, layer.qkv.in_features)
        batch, num_tokens, _ = x.shape
        angles = batch, num_tokens, 1, layer.head_dim
        if cos.shape != angles or signed_sin.shape != angles:
            raise ValueError(f"cos and sin must be {angles}, got {tuple(cos.shape)}")
        cos, signed_sin = _ready(cos, layer.head_dim), _ready(signed_sin, layer.head_dim)
        heads = x.new_empty((batch, num_tokens, layer.heads + 2 * layer.kv_heads, layer.head_dim))
        self.library.before_attention(
            ctypes.byref(layer), x.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(),
            SPACE.take(x.numel()), heads.data_ptr(), batch * num_tokens, torch.get_num_threads(),
        )  # fmt: skip
        return heads

    def after_attention(
        self, layer: Layer, attended: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """What the layer returns, [B, T, hidden].

        attended: [B, T, heads, head_dim]; x: [B, T, hidden], what the layer was given.
        """
        x = _ready(x, layer.output.out)
        attended = _ready(attended.flatten(2), layer.output.in_features)
        if attended.shape[:2] != x.shape[:2]:
            raise ValueError(f"{tuple(attended.shape)} does not belong to {tuple(x.shape)}")
        out, rows = torch.empty_like(x), x.numel() // x.shape[-1]
        space = SPACE.take(rows * (x.shape[-1] + layer.down.in_features + layer.gate_up.out))
        self.library.after_attention(
            ctypes.byref(layer), attended.data_ptr(), x.data_ptr(), space, out.data_ptr(), rows,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def store_kv(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write key, value [T, kv_heads, head_dim] to the slots [T] int64 of a layer's memory.

        keys, values: [kv_heads, pages, page_size, head_dim].
        """
        if slots.dtype != torch.int64:
            raise TypeError(f"slots must be int64, got {slots.dtype}")
        memory = Memory.of(keys, values)
        key, value = _checked(key, memory.key_dim), _checked(value, memory.value_dim)
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            key, value = key.contiguous(), value.contiguous()
        key_token, key_head, _ = key.stride()
        value_token, value_head, _ = value.stride()
        self.library.store_kv(
            ctypes.byref(memory), key.data_ptr(), key_token, key_head, value.data_ptr(),
            value_token, value_head, slots.data_ptr(), len(slots),
        )  # fmt: skip

    def paged_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_table: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """The queries of B requests, one after the other: each sees its request up to itself.

        query: [T, heads, head_dim]; keys, values: [kv_heads, pages, page_size, head_dim];
        page_table: [B, P] int32; query_starts: [B + 1] int32, of which only differences matter;
        seq_lens: [B] int32, up to the last query. Returns [T, heads, head_dim].
        """
        memory = Memory.of(keys, values)
        query = _ready(query, memory.key_dim)
        if not page_table.dtype == query_starts.dtype == seq_lens.dtype == torch.int32:
            raise TypeError("the page table, starts and lengths must be int32")
        requests, pages = page_table.shape
        width, inside = page_table.stride()
        if inside != 1 or not (query_starts.is_contiguous() and seq_lens.is_contiguous()):
            raise ValueError("the page table's rows, starts and lengths must lie side by side")
        tokens, heads, _ = query.shape
        splits = -(-pages * memory.page_size // self.split_size)
        lines = min(tokens, self.block_size) * heads * splits
        parts = SPACE.take(lines * (memory.value_dim + 2))
        softmax = parts + 4 * lines * memory.value_dim
        output = query.new_empty((tokens, heads, memory.value_dim))
        self.library.paged_attention(
            ctypes.byref(memory), query.data_ptr(), page_table.data_ptr(),
            query_starts.data_ptr(), seq_lens.data_ptr(), parts, softmax, output.data_ptr(),
            requests, heads, width, splits, scale, torch.get_num_threads(),
        )  # fmt: skip
        return output


def _checked(x: torch.Tensor, width: int) -> torch.Tensor:
    """The tensor, [..., width]. Raises `TypeError` or `ValueError` for what C would misread."""
    if x.dtype != torch.float32 or not x.is_cpu:
        raise TypeError(f"the kernels are for float32 on a CPU, got {x.dtype} on {x.device}")
    if x.shape[-1] != width:
        raise ValueError(f"the last dimension must be {width}, got {x.shape[-1]}")
    return x


def _ready(x: torch.Tensor, width: int) -> torch.Tensor:
    """`_checked`, with its numbers one after the other."""
    return _checked(x, width).contiguous()


@functools.cache
def kernels() -> Kernels | None:
    """The kernels of this machine; None where they cannot be compiled."""
    library = load_library()
    return None if library is None else bind(library)


def bind(library: ctypes.CDLL) -> Kernels:
    """The functions of a compiled library."""
    signatures: dict[str, tuple[Any, ...]] = {
        "linear_alone": (*[POINTER] * 3, SIZE, ctypes.c_int),
        "before_attention": (*[POINTER] * 6, SIZE, ctypes.c_int),
        "after_attention": (*[POINTER] * 5, SIZE, ctypes.c_int),
        "store_kv": (*[POINTER] * 2, *[SIZE] * 2, POINTER, *[SIZE] * 2, POINTER, SIZE),
        "paged_attention": (*[POINTER] * 8, *[SIZE] * 4, ctypes.c_float, ctypes.c_int),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return Kernels(library, library.panel_size(), library.split_size(), library.block_size())
