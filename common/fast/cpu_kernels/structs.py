"""C structures with the addresses and sizes of weights, layers, memory and requests.

C does not check what is at an address. Therefore the code that creates one of these structures must
check the tensors, and must keep them alive.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..stored.weight import StoredWeight

POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
PACKED = {torch.int8: 1, torch.uint8: 2, torch.int16: 3}  # the type of the memory: see `lines.h`


class Weight(ctypes.Structure):
    """A weight in its format, as `linear.c` reads it."""

    _fields_ = (("data", POINTER), ("out", SIZE), ("format", SIZE))

    @classmethod
    def of(cls, stored: StoredWeight) -> Weight:
        """stored: a weight that lives as long as the structure."""
        return cls(stored.data.data_ptr(), stored.out, stored.format.number)


class Linear(ctypes.Structure):
    """A product with one weight, or with several weights of the same inputs."""

    PARTS = 3  # the most weights
    kept: tuple[Sequence[StoredWeight], torch.Tensor | None]  # C has only their addresses
    _fields_ = (
        ("bias", POINTER), ("in_features", SIZE), ("out", SIZE), ("count", SIZE),
        ("weights", Weight * PARTS),
    )  # fmt: skip

    @classmethod
    def of(cls, weights: Sequence[StoredWeight], bias: torch.Tensor | None) -> Linear:
        """bias: [out] of all weights. Raises `ValueError` for weights that do not fit together."""
        inputs, out = weights[0].inputs, sum(weight.out for weight in weights)
        if len(weights) > cls.PARTS or any(weight.inputs != inputs for weight in weights):
            raise ValueError(f"a product has 1 to {cls.PARTS} weights of the same inputs")
        if bias is not None and (checked(bias).shape != (out,) or not bias.is_contiguous()):
            raise ValueError(f"the bias must have {out} numbers, got {tuple(bias.shape)}")
        parts = (Weight * cls.PARTS)(*(Weight.of(weight) for weight in weights))
        pointer = None if bias is None else bias.data_ptr()
        linear = cls(pointer, inputs, out, len(weights), parts)
        linear.kept = tuple(weights), bias
        return linear


class Layer(ctypes.Structure):
    """A decoder layer as `layer.c` reads it."""

    _fields_ = (
        ("input_norm", POINTER), ("mlp_norm", POINTER), ("q_norm", POINTER), ("k_norm", POINTER),
        ("epsilon", ctypes.c_double), ("heads", SIZE), ("kv_heads", SIZE), ("head_dim", SIZE),
        ("qkv", Linear), ("output", Linear), ("gate_up", Linear), ("down", Linear),
    )  # fmt: skip

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        # Copies of what each call needs, as Python numbers: reading a field of the structure is
        # slower.
        self.address = ctypes.addressof(self)
        self.hidden: int = self.qkv.in_features
        self.attended: int = self.output.in_features
        self.sizes = self.heads, self.kv_heads, self.kv_heads, self.head_dim
        self.space: int = self.hidden + self.down.in_features  # float32 numbers for each token


class Heads(ctypes.Structure):
    """Memory for q, k and v of the tokens of a forward, and the cosines and sines of RoPE.

    All layers use the same memory, one after the other.
    """

    _fields_ = (("cos", POINTER), ("sin", POINTER), ("memory", POINTER), ("rows", SIZE))
    kept: tuple[torch.Tensor, ...]
    address: int
    sizes: tuple[int, ...]  # the numbers of heads of q, k and v; head_dim
    tokens: torch.Size  # [B, T]
    views: tuple[torch.Tensor, ...]  # q, k, v: [B, heads, T, head_dim]

    @classmethod
    def of(cls, cos: torch.Tensor, signed_sin: torch.Tensor, sizes: tuple[int, ...]) -> Heads:
        """Allocate the memory.

        cos, signed_sin (negative in the first half): [B, T, 1, head_dim]; sizes: the numbers of
        heads of q, k and v. Raises `TypeError` or `ValueError` for tensors that C would misread.
        """
        if cos.shape != signed_sin.shape:
            raise ValueError(f"cos has shape {tuple(cos.shape)}, but sin {tuple(signed_sin.shape)}")
        batch, num_tokens, _, head_dim = cos.shape
        memory = checked(cos).new_empty((batch, num_tokens, sum(sizes), head_dim))
        kept = cos.contiguous(), checked(signed_sin).contiguous(), memory
        heads = cls(*(x.data_ptr() for x in kept), batch * num_tokens)
        heads.kept, heads.address = kept, ctypes.addressof(heads)
        heads.sizes, heads.tokens = (*sizes, head_dim), cos.shape[:2]
        heads.views = memory.transpose(1, 2).split(sizes, dim=1)
        return heads


class Memory(ctypes.Structure):
    """Keys and values of a layer as `attention.c` reads them.

    slots, page_size: how far heads and pages are apart, in tokens. packed: 0, or the format of the
    elective kv_quant's lines, which have a scale and then a byte or four bits for each dimension.
    """

    SCALE_BYTES = 4
    _fields_ = (
        ("keys", POINTER), ("values", POINTER), ("kv_heads", SIZE), ("slots", SIZE),
        ("page_size", SIZE), ("key_dim", SIZE), ("value_dim", SIZE), ("packed", SIZE),
    )  # fmt: skip

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Memory:
        """keys, values: [kv_heads, pages, page_size, head_dim], each page contiguous in a head.

        Raises `ValueError` if keys and values have different distances between pages or heads.
        """
        (kv_heads, *_, key_line), value_line = keys.shape, values.shape[-1]
        slots, page_size = keys.stride(0) // key_line, keys.stride(1) // key_line
        if values.stride()[:2] != (slots * value_line, page_size * value_line):
            raise ValueError(f"keys have strides {keys.stride()}, but values {values.stride()}")
        packed = PACKED.get(keys.dtype, 0)

        def dim(line: int) -> int:
            if not packed:
                return line
            per_byte = 2 if keys.dtype == torch.int16 else 1
            return (line * keys.itemsize - cls.SCALE_BYTES) * per_byte

        return cls(
            keys.data_ptr(), values.data_ptr(), kv_heads, slots, page_size, dim(key_line),
            dim(value_line), packed,
        )  # fmt: skip


class Layers:
    """The layers of a model and their KV memory. All layers have the same sizes."""

    def __init__(
        self, layers: Sequence[Layer], memory: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """memory: keys and values of each layer, [kv_heads, pages, page_size, head_dim].

        Raises `ValueError` for layers and memory that do not fit together.
        """
        self.first, self.kept = layers[0], layers  # C has only their addresses
        # The memory belongs to an engine, which may free it.
        self.memory = [weakref.ref(x) for kept in memory for x in kept]
        found = [Memory.of(*kept) for kept in memory]
        shape = self.first.kv_heads, self.first.head_dim, self.first.head_dim
        if (
            any((m.kv_heads, m.key_dim, m.value_dim) != shape for m in found)
            or any((x.sizes, x.space) != (self.first.sizes, self.first.space) for x in layers)
            or len({m.page_size for m in found}) != 1
            or len(found) != len(layers)
        ):
            raise ValueError("the layers and their KV memory do not fit together")
        self.page_size: int = found[0].page_size
        self.layers = (POINTER * len(layers))(*(layer.address for layer in layers))
        self.memories = (Memory * len(found))(*found)

    @property
    def is_alive(self) -> bool:
        """Whether the KV memory still exists."""
        return all(memory() is not None for memory in self.memory)


class BatchLayout(ctypes.Structure):
    """The requests of a forward and their pages. They are the same in all layers."""

    _fields_ = (
        ("page_table", POINTER), ("starts", POINTER), ("lengths", POINTER), ("slots", POINTER),
        ("width", SIZE),
    )  # fmt: skip
    kept: tuple[torch.Tensor, ...]
    address: int
    count: int
    pages: int  # the width of the page table
    tokens: int
    longest: int  # the number of tokens of the longest context

    @classmethod
    def of(
        cls,
        page_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
    ) -> BatchLayout:
        """Collect the tensors that describe the requests of a forward.

        page_table: [B, P] int32; query_start_loc: [B + 1] int32; seq_lens: [B] int32, the number of
        tokens up to and including the last query; slots: [T] int64, the slot where the key and the
        value of each token are stored. Raises `TypeError` or `ValueError` for tensors that C would
        misread.
        """
        kept = page_table, query_start_loc, seq_lens, slots
        if not all(x.is_cpu for x in kept):
            raise TypeError(f"the kernels are for a CPU, got {[str(x.device) for x in kept]}")
        if [x.dtype for x in kept] != [torch.int32] * 3 + [torch.int64]:
            raise TypeError("the page table, starts and lengths must be int32, slots int64")
        if not len(page_table) == len(query_start_loc) - 1 == len(seq_lens):
            raise ValueError("there must be a row of pages, a length and a start for each request")
        width, inside = page_table.stride()
        if inside != 1 or not all(x.is_contiguous() for x in kept[1:]):
            raise ValueError("the page table's rows, starts, lengths and slots must be contiguous")
        requests = cls(*(x.data_ptr() for x in kept), width)
        requests.kept, requests.address = kept, ctypes.addressof(requests)
        requests.count, requests.pages = page_table.shape
        requests.tokens, requests.longest = len(slots), int(seq_lens.max())
        return requests

    def splits_of(self, split_size: int, page_size: int) -> int:
        """Return how many parts the longest context has. Raises `ValueError` if it has no room."""
        if self.longest > self.pages * page_size:
            raise ValueError(f"{self.longest} tokens do not fit in {self.pages} pages")
        return -(-self.longest // split_size)


def checked(x: torch.Tensor) -> torch.Tensor:
    """Return `x`. Raises `TypeError` unless it is float32 on a CPU, as C expects."""
    if x.dtype != torch.float32 or not x.is_cpu:
        raise TypeError(f"the kernels are for float32 on a CPU, got {x.dtype} on {x.device}")
    return x
