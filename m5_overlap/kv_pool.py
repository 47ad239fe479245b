"""`KVPool`: the memory of the KV cache. All pages of all layers are allocated at once."""

from __future__ import annotations

import gc

import torch

from common import EngineConfig
from common.hf.support import LayerKV
from common.memory import available_memory

FREE_MEMORY_SHARE = 0.8  # of a GPU; activations need the rest. Of main memory: half as much


class KVPool:
    """Keys and values of each layer: [kv_heads, 1 + num_pages, page_size, head_dim].

    Page 0 is the padding page. A page of one head is contiguous, so a kernel reads it as one tile.
    Because the heads come first, the pages can be viewed as slots: [kv_heads, num_slots, head_dim].
    """

    def __init__(
        self, layers: list[LayerKV], config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises `RuntimeError` that names the limits if not even one request fits."""
        self.page_size = config.page_size
        page_bytes = page_size_in_bytes(layers, config.page_size, dtype)
        self.num_pages = config.num_pages or affordable_pages(config, page_bytes, device)

        def pages(num_heads: int, head_dim: int) -> torch.Tensor:
            shape = (num_heads, 1 + self.num_pages, config.page_size, head_dim)
            return torch.empty(shape, dtype=dtype, device=device)

        try:
            self.keys = [pages(layer.num_kv_heads, layer.key_dim) for layer in layers]
            self.values = [pages(layer.num_kv_heads, layer.value_dim) for layer in layers]
        except RuntimeError as error:
            raise RuntimeError(
                f"no memory for num_pages={self.num_pages} KV pages of {page_bytes} bytes ({error})"
            ) from error

    def release(self) -> None:
        """Free the memory. No forward may follow."""
        self.keys, self.values = [], []


def page_size_in_bytes(layers: list[LayerKV], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page: keys and values of all layers together."""
    values = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return values * page_size * dtype.itemsize


def affordable_pages(config: EngineConfig, page_bytes: int, device: torch.device) -> int:
    """Return as many pages as fit in free memory, but no more than all rows could ever use."""
    assert config.max_model_len is not None
    one_request = -(-config.max_model_len // config.page_size)
    num_pools = config.tensor_parallel_size if device.type == "cpu" else 1  # in this memory
    affordable = free_memory(device) // num_pools // page_bytes
    if affordable < one_request:
        raise RuntimeError(
            f"free memory holds {affordable} KV pages, and one request of "
            f"max_model_len={config.max_model_len} takes {one_request}: lower max_model_len"
        )
    return min(affordable, config.max_num_seqs * one_request)


def free_memory(device: torch.device) -> int:
    """Return the number of bytes that the pool may take."""
    if device.type == "cuda":
        gc.collect()  # engines that were dropped, but not closed
        torch.cuda.empty_cache()  # torch keeps freed memory, and CUDA counts it as used
        return int(torch.cuda.mem_get_info(device)[0] * FREE_MEMORY_SHARE)
    return int(available_memory() * FREE_MEMORY_SHARE / 2)
