"""The attention operations by Triton kernels, for packed lines and for the float pages of m5."""

from __future__ import annotations

import torch
import triton

from . import packed_kernels
from .attention import AttentionMetadata
from .m5_triton_ops import (
    constants,
    require_runnable,
    split_size,
    tiles,
)
from .m5_triton_ops import paged_decode as float_decode
from .m5_triton_ops import paged_prefill as float_prefill
from .m5_triton_ops import store_kv as float_store_kv
from .packing import SCALE_BYTES, is_packed

__all__ = ["constants", "paged_decode", "paged_prefill", "require_runnable", "split_size",
           "store_kv", "tiles"]  # fmt: skip


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: AttentionMetadata,
) -> None:
    """Pack key and value [T, kv_heads, head_dim], and write them to their slots."""
    if not is_packed(keys):
        return float_store_kv(keys, values, key, value, meta)
    for x, lines in ((key, keys), (value, values)):
        tokens, heads, dim = x.shape
        packed_kernels.store_kernel[(tokens, heads)](
            x, lines, lines.view(torch.float32), meta.slot_mapping,
            x.stride(0), x.stride(1), lines.stride(0),
            DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return None


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with one query per decoding request. Query and result: [decodes, heads, head_dim]."""
    if not is_packed(keys):
        return float_decode(query, keys, values, meta, scale)
    return _attend(query, keys, values, meta, scale, first=0, count=meta.num_decodes)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with the queries of all chunks. Query and result: [tokens, heads, head_dim]."""
    if not is_packed(keys):
        return float_prefill(query, keys, values, meta, scale)
    count = meta.seq_lens.shape[0] - meta.num_decodes
    return _attend(query, keys, values, meta, scale, first=meta.num_decodes, count=count)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    first: int,
    count: int,
) -> torch.Tensor:
    """Attend with the queries of `count` requests, from request `first` on."""
    tokens, heads, _dim = query.shape
    numbers = keys[..., SCALE_BYTES:], values[..., SCALE_BYTES:]
    output = query.new_empty((tokens, heads, numbers[1].shape[-1]))
    shape = constants(query, *numbers, meta.page_size)
    tile = tiles(query, shape)["prefill"]
    blocks = tokens // (tile["ROWS"] // shape["GROUP"]) + count
    packed_kernels.attend_kernel[(blocks, keys.shape[0])](
        query, keys, values, keys.view(torch.float32), values.view(torch.float32), output,
        meta.page_table, meta.query_start_loc, meta.seq_lens,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        keys.stride(0), values.stride(0), meta.page_table.stride(0),
        scale, first, count, first,
        **shape, **tile,
    )  # fmt: skip
    return output
