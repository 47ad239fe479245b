"""`KVPool`: the memory of the KV cache. Layers of different groups share it."""

from __future__ import annotations

from dataclasses import replace

import torch

from common import EngineConfig
from common.hf.support import LayerKV

from .kv_groups import BlockAllocator, make_groups
from .m5_kv_pool import FREE_MEMORY_SHARE, free_memory, page_size_in_bytes
from .m5_kv_pool import KVPool as M5KVPool

__all__ = ["FREE_MEMORY_SHARE", "KVPool", "affordable_pages", "free_memory"]


class KVPool(M5KVPool):
    """Keys and values of each layer: [kv_heads, 1 + num_pages, page_size, head_dim].

    Each group has pages of its own, so layers of different groups can share memory: the first layer
    of each group has the same tensors, and so on. Layers of other shapes have tensors of their own.
    """

    def __init__(
        self, layers: list[LayerKV], config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert config.max_model_len is not None
        self.layers = layers
        self.groups = make_groups(layers, config.max_model_len)
        self.group_of = {layer: n for n, group in enumerate(self.groups) for layer in group.layers}
        shapes = [replace(layer, window=None, variants=()) for layer in layers]
        numbered = [pair for group in self.groups for pair in enumerate(group.layers)]
        place_of = {layer: (place, shapes[layer]) for place, layer in numbered}
        places = list(dict.fromkeys(place_of.values()))
        shapes = [shape for _, shape in places]
        if not config.num_pages:
            page_bytes = page_size_in_bytes(shapes, config.page_size, dtype)
            one_request = BlockAllocator(0, config.page_size, self.groups).most_pages(
                config.max_model_len, config.max_num_batched_tokens
            )
            num_pages = affordable_pages(config, page_bytes, device, one_request)
            config = replace(config, num_pages=num_pages)
        super().__init__(shapes, config, dtype, device)
        memory_of = [places.index(place_of[layer]) for layer in range(len(layers))]
        self.keys = [self.keys[index] for index in memory_of]
        self.values = [self.values[index] for index in memory_of]


def affordable_pages(
    config: EngineConfig, page_bytes: int, device: torch.device, one_request: int
) -> int:
    """Return as many pages as fit in free memory, but no more than all rows could ever use.

    one_request: the pages that a request of the largest length needs, in all groups.
    """
    num_pools = config.tensor_parallel_size if device.type == "cpu" else 1  # in this memory
    affordable = free_memory(device) // num_pools // page_bytes
    if affordable < one_request:
        raise RuntimeError(
            f"free memory holds {affordable} KV pages, and one request of "
            f"max_model_len={config.max_model_len} takes {one_request}: lower max_model_len"
        )
    return min(affordable, config.max_num_seqs * one_request)
