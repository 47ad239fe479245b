"""`KVPool`: the memory of the KV cache, in packed lines."""

from __future__ import annotations

from dataclasses import replace

import torch

from common import EngineConfig
from common.hf.support import LayerKV

from .m5_kv_pool import (
    FREE_MEMORY_SHARE,
    affordable_pages,
    free_memory,
    page_size_in_bytes,
)
from .m5_kv_pool import KVPool as FloatKVPool
from .packing import SCALE_BYTES, can_pack

__all__ = [
    "FREE_MEMORY_SHARE",
    "FloatKVPool",
    "KVPool",
    "affordable_pages",
    "free_memory",
    "page_size_in_bytes",
]


class KVPool(FloatKVPool):
    """Keys and values of each layer: [kv_heads, 1 + num_pages, page_size, 4 + head_dim] int8.

    Each line has a scale: see `packing.py`. A page takes fewer bytes than in m5, so more pages fit
    in the same memory. Models with heads that cannot be packed keep m5's pool.
    """

    def __init__(
        self, layers: list[LayerKV], config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        lines = layers
        if can_pack(layers, dtype):
            lines = [
                replace(
                    layer,
                    key_dim=SCALE_BYTES + layer.key_dim,
                    value_dim=SCALE_BYTES + layer.value_dim,
                )
                for layer in layers
            ]
        super().__init__(lines, config, torch.int8 if lines is not layers else dtype, device)
        self.in_float = lambda: FloatKVPool(layers, config, dtype, device)
