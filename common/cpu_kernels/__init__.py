"""Kernels in C for float32 on a CPU, compiled on the machine they run on.

`kernels()` gives them, or None where there is no C compiler; torch's operations do the same then.
What is the same in all layers of a forward is checked once and given as a structure (`structs.py`):
around a layer's few C calls, the calls themselves are what takes time.
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
from .structs import POINTER, SIZE, Heads, Layer, Linear, Memory, Requests, checked

__all__ = ["Heads", "Kernels", "Layer", "Linear", "Requests", "bind", "kernels"]


class Space(threading.local):
    """Memory for what a kernel computes on the way, one for each thread, kept from call to call:
    new memory comes page by page from the system, zeroed, which takes longer than using it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.size, self.address = 0, 0

    def take(self, count: int) -> int:
        """The address of `count` float32 numbers, good until the thread's next call."""
        if self.size < count:
            self.memory = torch.empty(count)
            self.size, self.address = count, self.memory.data_ptr()
        return self.address


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
        x = checked(x).contiguous()
        if x.shape[-1] != linear.in_features:
            raise ValueError(f"the last dimension must be {linear.in_features}, got {x.shape[-1]}")
        out = x.new_empty((*x.shape[:-1], linear.out))
        self.library.linear_alone(
            ctypes.byref(linear), x.data_ptr(), out.data_ptr(), out.numel() // linear.out,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def before_attention(self, layer: Layer, x: torch.Tensor, heads: Heads) -> None:
        """q, k and v of a layer, into `heads`. x: [B, T, hidden]."""
        x = checked(x).contiguous()
        if x.shape != (*heads.tokens, layer.hidden) or heads.sizes != layer.sizes:
            raise ValueError(f"{tuple(x.shape)} is not what {tuple(heads.tokens)} tokens have here")
        self.library.before_attention(
            layer.address, heads.address, x.data_ptr(), SPACE.take(x.numel()),
            torch.get_num_threads(),
        )  # fmt: skip

    def after_attention(
        self, layer: Layer, attended: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """What the layer returns, [B, T, hidden].

        attended: [B, T, heads, head_dim]; x: [B, T, hidden], what the layer was given.
        """
        x, attended = checked(x).contiguous(), checked(attended).contiguous()
        batch, num_tokens, hidden = x.shape
        rows = batch * num_tokens
        if hidden != layer.hidden or attended.numel() != rows * layer.attended:
            raise ValueError(f"{tuple(attended.shape)} does not belong to {tuple(x.shape)}")
        out = x.new_empty(x.shape)
        self.library.after_attention(
            layer.address, attended.data_ptr(), x.data_ptr(), SPACE.take(rows * layer.space),
            out.data_ptr(), rows, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def store_kv(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        requests: Requests,
    ) -> None:
        """Write key, value [T, kv_heads, head_dim] to their slots of a layer's memory.

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
        requests: Requests,
        first: int,
        count: int,
        scale: float,
    ) -> torch.Tensor:
        """The queries of `count` requests from the `first` one on, one after the other: each sees
        its request up to itself.

        query: [T, heads, head_dim]; keys, values: [kv_heads, pages, page_size, head_dim].
        Returns [T, heads, head_dim].
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
        if requests.longest > requests.pages * memory.page_size:
            raise ValueError(f"{requests.longest} tokens are not in {requests.pages} pages")
        splits = -(-requests.longest // self.split_size)
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
    """x: [T, heads, head_dim]. The same, the numbers of each head side by side."""
    return x if checked(x).stride(-1) == 1 else x.contiguous()


@functools.cache
def kernels() -> Kernels | None:
    """The kernels of this machine; None where they cannot be compiled."""
    library = load_library()
    return None if library is None else bind(library)


def bind(library: ctypes.CDLL) -> Kernels:
    """The functions of a compiled library."""
    signatures: dict[str, tuple[Any, ...]] = {
        "linear_alone": (*[POINTER] * 3, SIZE, ctypes.c_int),
        "before_attention": (*[POINTER] * 4, ctypes.c_int),
        "after_attention": (*[POINTER] * 5, SIZE, ctypes.c_int),
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
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return Kernels(library, library.panel_size(), library.split_size(), library.block_size())
