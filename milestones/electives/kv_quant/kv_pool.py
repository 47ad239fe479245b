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
    in_format: Callable[[torch.dtype], KVPool]  # returns a pool with lines of a format

    def __init__(
        self,
        layers: list[LayerKV],
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        line_type: torch.dtype | None = None,
    ) -> None:
        """line_type: of the memory. None, as in m5's runner: there is none before `in_format`."""
        self.in_float = lambda: FloatKVPool(layers, config, dtype, device)
        self.in_format = lambda line_type: KVPool(layers, config, dtype, device, line_type)
        if line_type is None:
            return

        def in_lines(layer: LayerKV) -> LayerKV:
            dims = layer.key_dim, layer.value_dim
            key_dim, value_dim = (line_length(dim, line_type) for dim in dims)
            return replace(layer, key_dim=key_dim, value_dim=value_dim)

        packs = can_pack(layers, dtype)
        lines = list(map(in_lines, layers)) if packs else layers
        super().__init__(lines, config, line_type if packs else dtype, device)
