"""`KVPool`: the memory of the KV cache, in packed lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from common import EngineConfig
from common.hf.support import LayerKV

from .formats import line_length
from .m5_kv_pool import (
    FREE_MEMORY_SHARE,
    affordable_pages,
    free_memory,
    page_size_in_bytes,
)
from .m5_kv_pool import KVPool as FloatKVPool
from .packing import can_pack

__all__ = [
    "FREE_MEMORY_SHARE",
    "FloatKVPool",
    "KVPool",
    "affordable_pages",
    "free_memory",
    "page_size_in_bytes",
]


class KVPool(FloatKVPool):
    """Keys and values of each layer: [kv_heads, 1 + num_pages, page_size, length of a line].

    Each line has a scale: see `packing.py`. A page takes fewer bytes than in m5, so more pages fit
    in the same memory. Models with heads that cannot be packed keep m5's pool.
    """

    in_float: Callable[[], FloatKVPool]  # returns m5's pool for the same layers
    in_format: Callable[[torch.dtype], KVPool]  # returns a pool with lines of another format

    def __init__(
        self,
        layers: list[LayerKV],
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        line_type: torch.dtype = torch.int8,
    ) -> None:
        lines = layers
        if can_pack(layers, dtype):
            lines = [
                replace(
                    layer,
                    key_dim=line_length(layer.key_dim, line_type),
                    value_dim=line_length(layer.value_dim, line_type),
                )
                for layer in layers
            ]
        super().__init__(lines, config, dtype if lines is layers else line_type, device)
        self.in_float = lambda: FloatKVPool(layers, config, dtype, device)
        self.in_format = lambda other: KVPool(layers, config, dtype, device, other)
