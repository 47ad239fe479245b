"""The attention operations of `attention.py`, by kernels in C: same names, same signatures.

They read the pages where they lie, as the Triton kernels do; torch's have to gather them first.
"""

from __future__ import annotations

import torch

from common.cpu_kernels import Kernels, Requests, kernels
from common.latest import Latest

from .attention import AttentionMetadata


def is_runnable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels can run: in float32, on a CPU, with a C compiler."""
    return device.type == "cpu" and dtype == torch.float32 and kernels() is not None


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: AttentionMetadata,
) -> None:
    """Write key and value [T, kv_heads, head_dim] to their slots of a layer's memory."""
    _kernels().store_kv(keys, values, key, value, _requests(meta))


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """One query for each decoding request: [decodes, heads, head_dim], returns the same shape."""
    count = meta.num_decodes
    return _kernels().paged_attention(query, keys, values, _requests(meta), 0, count, scale)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """The queries of all chunks, [tokens, heads, head_dim]: each sees its request up to itself."""
    first, count = meta.num_decodes, len(meta.contexts) - meta.num_decodes
    return _kernels().paged_attention(query, keys, values, _requests(meta), first, count, scale)


@Latest
def _requests(meta: AttentionMetadata) -> Requests:
    """The same for all layers of a forward."""
    return Requests.of(meta.page_table, meta.query_starts, meta.seq_lens, meta.slot_mapping)


def _kernels() -> Kernels:
    found = kernels()
    assert found is not None, "is_runnable says so"
    return found
