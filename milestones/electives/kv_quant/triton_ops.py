"""The attention operations by Triton kernels, for packed lines and for the float pages of m5."""

from __future__ import annotations

import torch
import triton

from . import packed_kernels
from .attention import AttentionMetadata
from .formats import FORMATS, LARGEST_E4M3, is_packed, unpack_as
from .m5_triton_ops import (
    constants,
    require_runnable,
    split_size,
    tiles,
)
from .m5_triton_ops import paged_decode as float_decode
from .m5_triton_ops import paged_prefill as float_prefill
from .m5_triton_ops import store_kv as float_store_kv
from .packing import LARGEST

__all__ = ["constants", "paged_decode", "paged_prefill", "require_runnable", "split_size",
           "store_kv", "tiles"]  # fmt: skip

NAMES = {dtype: name for name, dtype in FORMATS.items()}


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
    is_fp8 = keys.dtype == torch.uint8
    for x, memory in ((key, keys), (value, values)):
        tokens, heads, dim = x.shape
        lines, scales = _bytes_and_scales(memory)
        place = x, lines, scales, meta.slot_mapping, x.stride(0), x.stride(1), lines.stride(0)
        if memory.dtype == torch.int16:
            packed_kernels.store_int4_kernel[(tokens, heads)](
                *place, DIM=dim, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1
            )
            continue
        packed_kernels.store_kernel[(tokens, heads)](
            *place, DIM=dim, BLOCK=triton.next_power_of_2(dim), FP8=is_fp8,
            LARGEST=float(LARGEST_E4M3 if is_fp8 else LARGEST), num_warps=1,
        )  # fmt: skip
    return None


def _bytes_and_scales(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same memory twice: as bytes, and as the numbers that lines begin with."""
    if memory.dtype == torch.int16:
        return memory.view(torch.uint8), memory
    return memory, memory.view(torch.float32)


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
    shape = constants(query, unpack_as(keys[:, :0]), unpack_as(values[:, :0]), meta.page_size)
    output = query.new_empty((tokens, heads, shape["VALUE_DIM"]))
    (k, k_scales), (v, v_scales) = _bytes_and_scales(keys), _bytes_and_scales(values)
    tile = tiles(query, shape)["prefill"]
    blocks = tokens // (tile["ROWS"] // shape["GROUP"]) + count
    packed_kernels.attend_kernel[(blocks, keys.shape[0])](
        query, k, v, k_scales, v_scales, output,
        meta.page_table, meta.query_start_loc, meta.seq_lens,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        k.stride(0), v.stride(0), meta.page_table.stride(0),
        scale, first, count, first,
        FORMAT=NAMES[keys.dtype], **shape, **tile,
    )  # fmt: skip
    return output
