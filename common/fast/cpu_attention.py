"""Attention through a page table by kernels in C, for a CPU.

The functions have the names and the signatures of those in each milestone's `attention.py`. The
kernels read the pages in place, as the Triton kernels do. The functions in torch must gather the
pages first.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .cpu_kernels import BatchLayout, Kernels, kernels
from .identity_cache import IdentityCache


class PagedMetadata(Protocol):
    """What the kernels read of a milestone's `AttentionMetadata`."""

    slot_mapping: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32
    page_table: torch.Tensor  # [B, P] int32
    num_decodes: int


def is_runnable(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether these kernels can run: in float32, on a CPU, with a C compiler."""
    return device.type == "cpu" and dtype == torch.float32 and kernels() is not None


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: PagedMetadata,
) -> None:
    """Write key and value [T, kv_heads, head_dim] to their slots in a layer's memory."""
    _kernels().store_kv(keys, values, key, value, layout_of(meta))


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: PagedMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with one query per decoding request. Query and result: [decodes, heads, head_dim]."""
    count = meta.num_decodes
    return _kernels().paged_attention(query, keys, values, layout_of(meta), 0, count, scale)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: PagedMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with the queries of all chunks. Query and result: [tokens, heads, head_dim]."""
    first, count = meta.num_decodes, len(meta.seq_lens) - meta.num_decodes
    return _kernels().paged_attention(query, keys, values, layout_of(meta), first, count, scale)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    requests: BatchLayout,
    scale: float,
) -> torch.Tensor:
    """Attend with one query per request, [B, heads, head_dim], to memory that is not a KV pool."""
    return _kernels().paged_attention(query, keys, values, requests, 0, requests.count, scale)


@IdentityCache
def layout_of(meta: PagedMetadata) -> BatchLayout:
    """Return the addresses that the kernels read. They are the same for all layers of a forward."""
    return BatchLayout.of(meta.page_table, meta.query_start_loc, meta.seq_lens, meta.slot_mapping)


def _kernels() -> Kernels:
    found = kernels()
    assert found is not None, "these kernels run only where `is_runnable` is True"
    return found
