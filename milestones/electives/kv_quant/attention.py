"""Attention through a page table to packed lines, in plain torch.

Keys and values are packed before they are stored. A query reads them from the pages, its own token
included, and never the numbers that the model has just computed. If it did, the first chunk of a
prompt would read float numbers, and the next chunk packed ones: chunks would change answers (I2).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from .formats import is_packed, pack_as, unpack_as
from .m5_attention import (
    NAME,
    AttentionMetadata,
    PagedBatch,
    _causal,
    paged_attention,
    use_paged_attention,
)
from .m5_attention import paged_decode as float_decode
from .m5_attention import paged_prefill as float_prefill
from .m5_attention import store_kv as m5_store_kv

__all__ = [
    "NAME",
    "AttentionMetadata",
    "PagedBatch",
    "paged_attention",
    "paged_decode",
    "paged_prefill",
    "store_kv",
    "use_paged_attention",
]


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: AttentionMetadata,
) -> None:
    """Pack key and value [T, kv_heads, head_dim], and write them to their slots."""
    if is_packed(keys):
        key, value = pack_as(key, keys.dtype), pack_as(value, values.dtype)
    m5_store_kv(keys, values, key, value, meta)


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with one query per decoding request. Query and result: [decodes, heads, head_dim].

    The gather copies packed lines, a quarter of the bytes of float32. Then they are unpacked.
    """
    if not is_packed(keys):
        return float_decode(query, keys, values, meta, scale)
    num_kv_heads, batch, heads = keys.shape[0], query.shape[0], query.shape[1]
    grouped = query.reshape(batch, num_kv_heads, heads // num_kv_heads, -1)
    output = query.new_empty(*grouped.shape[:-1], unpack_as(values[:0]).shape[-1])
    for group in meta.decode_groups:
        rows = slice(None) if group.rows is None else group.rows
        k, v = (unpack_as(group.gather(memory), query.dtype) for memory in (keys, values))
        bias = group.bias.to(query.dtype)
        output[rows] = scaled_dot_product_attention(
            grouped[rows], k, v, attn_mask=bias, scale=scale
        )
    return output.reshape(batch, heads, -1)


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
    repeats = query.shape[1] // keys.shape[0]
    outputs, start = [], 0
    chunks = zip(meta.query_lens_cpu[meta.num_decodes :], meta.chunk_slots, strict=True)
    for num_tokens, slots in chunks:
        q = query[start : start + num_tokens].transpose(0, 1)  # [heads, n, head_dim]
        lines = (memory.flatten(1, 2).index_select(1, slots) for memory in (keys, values))
        k, v = (unpack_as(x, query.dtype).repeat_interleave(repeats, dim=0) for x in lines)
        outputs.append(_causal(q[None], k[None], v[None], scale)[0].transpose(0, 1))
        start += num_tokens
    return torch.cat(outputs)
