"""Kernels in C for float32 on a CPU, compiled on the machine they run on.

`kernels()` gives them, or None where there is no C compiler; torch's operations do the same then.
Tensors are contiguous float32 on the CPU, their shapes are the caller's business, as in C.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

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
        panels = padded.view(-1, self.panel_size, weight.shape[1])
        return panels.transpose(1, 2).contiguous()

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]: each row the same bits, however many there are."""
        x = x.contiguous()
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
        x = x.contiguous()
        batch, num_tokens, _ = x.shape
        heads = x.new_empty((batch, num_tokens, layer.heads + 2 * layer.kv_heads, layer.head_dim))
        space = torch.empty_like(x)
        self.library.before_attention(
            ctypes.byref(layer), x.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(),
            space.data_ptr(), heads.data_ptr(), batch * num_tokens,
            torch.get_num_threads(),
        )  # fmt: skip
        return heads

    def after_attention(
        self, layer: Layer, attended: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """What the layer returns, [B, T, hidden].

        attended: [B, T, heads, head_dim]; x: [B, T, hidden], what the layer was given.
        """
        x, attended, out = x.contiguous(), attended.contiguous(), torch.empty_like(x)
        rows = x.numel() // x.shape[-1]
        space = x.new_empty((rows, x.shape[-1] + layer.down.in_features + layer.gate_up.out))
        self.library.after_attention(
            ctypes.byref(layer), attended.data_ptr(), x.data_ptr(), space.data_ptr(),
            out.data_ptr(), rows, torch.get_num_threads(),
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

        keys, values: [kv_heads, pages, page_size, head_dim]. Of key and value, only the numbers of
        a head must lie side by side.
        """
        steps = (SIZE * 4)(*key.stride()[:2], *value.stride()[:2])
        self.library.store_kv(
            ctypes.byref(Memory.of(keys, values)), key.data_ptr(), value.data_ptr(), steps,
            slots.data_ptr(), len(slots),
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
        page_table: [B, P] int32; query_starts: [B + 1] int32, differences count; seq_lens: [B]
        int32, up to the last query. Returns [T, heads, head_dim].
        """
        query = query.contiguous()
        tokens, heads, _ = query.shape
        value_dim = values.shape[-1]
        splits = -(-page_table.shape[1] * keys.shape[2] // self.split_size)
        lines = min(tokens, self.block_size) * heads * splits
        parts, softmax = query.new_empty(lines * value_dim), query.new_empty(lines * 2)
        output = query.new_empty((tokens, heads, value_dim))
        self.library.paged_attention(
            ctypes.byref(Memory.of(keys, values)), query.data_ptr(), page_table.data_ptr(),
            query_starts.data_ptr(), seq_lens.data_ptr(), parts.data_ptr(), softmax.data_ptr(),
            output.data_ptr(), len(page_table), heads, page_table.stride(0), splits,
            scale, torch.get_num_threads(),
        )  # fmt: skip
        return output


@functools.cache
def kernels() -> Kernels | None:
    """The kernels of this machine; None where they cannot be compiled."""
    library = load_library()
    if library is None:
        return None
    signatures: dict[str, tuple[Any, ...]] = {
        "linear_alone": (POINTER, POINTER, POINTER, SIZE, ctypes.c_int),
        "before_attention": (*[POINTER] * 6, SIZE, ctypes.c_int),
        "after_attention": (*[POINTER] * 5, SIZE, ctypes.c_int),
        "store_kv": (*[POINTER] * 5, SIZE),
        "paged_attention": (*[POINTER] * 8, *[SIZE] * 4, ctypes.c_float, ctypes.c_int),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return Kernels(library, library.panel_size(), library.split_size(), library.block_size())
