"""Decodes with windows, soft caps and sinks as a Triton kernel: a CUDA graph can replay them.

A program computes the query heads of one KV head of one request, over one split of the tokens that
they see. The grid depends on shapes only, as in `kernels.py`. `hybrid_attention.py` is the
reference, and computes prompts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention import AttentionMetadata
from .hybrid_attention import paged_prefill, store_kv
from .kernels import _slots
from .triton_ops import constants, split_size, tiles

__all__ = ["paged_decode", "paged_prefill", "store_kv"]


@triton.jit(do_not_specialize=["table_stride", "num_splits", "split_size"])
def window_decode_kernel(
    query, keys, values, page_table, seq_lens, partial, partial_lse,
    query_stride_b, query_stride_h, keys_stride_h, values_stride_h, table_stride,
    scale, softcap, num_splits, split_size,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend over one split. The arguments are those of `decode_kernel` in `kernels.py`.

    WINDOW: the newest tokens that a query sees; 0 for all. The splits begin at the first of them. A
    split without tokens writes zeros, and -inf as the logarithm of its sum.
    """
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request)
    start = split * split_size
    if WINDOW > 0:
        start += tl.maximum(length - WINDOW, 0)
    end = tl.minimum(start + split_size, length)
    group = tl.arange(0, ROWS)
    head = kv_head * GROUP + group
    k_dim, v_dim = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q = tl.load(
        query + request * query_stride_b + head[:, None] * query_stride_h + k_dim[None, :],
        mask=(group[:, None] < GROUP) & (k_dim[None, :] < KEY_DIM), other=0.0,
    )  # fmt: skip
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for first in range(start, end, TILE):
        positions = first + tl.arange(0, TILE)
        inside = positions < end
        slots = _slots(page_table, request * table_stride, positions, inside, PAGE_SIZE)
        k = tl.load(
            keys + kv_head * keys_stride_h + slots[:, None] * KEY_DIM + k_dim[None, :],
            mask=inside[:, None] & (k_dim[None, :] < KEY_DIM), other=0.0,
        )  # fmt: skip
        v = tl.load(
            values + kv_head * values_stride_h + slots[:, None] * VALUE_DIM + v_dim[None, :],
            mask=inside[:, None] & (v_dim[None, :] < VALUE_DIM), other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:  # softcap * tanh(score / softcap)
            doubled = tl.exp(-2.0 * tl.abs(scores) / softcap)
            size = softcap * (1.0 - doubled) / (1.0 + doubled)
            scores = tl.where(scores < 0.0, -size, size)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_maximum[:, None])
        decay = tl.exp(maximum - new_maximum)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        maximum = new_maximum
    num_heads = tl.num_programs(1) * GROUP
    row = (request * num_heads + head) * num_splits + split  # [B, heads, splits]
    tl.store(partial_lse + row, maximum + tl.log(total), mask=group < GROUP)
    tl.store(
        partial + row[:, None] * VALUE_DIM + v_dim[None, :],
        acc / tl.where(total == 0.0, 1.0, total)[:, None],
        mask=(group[:, None] < GROUP) & (v_dim[None, :] < VALUE_DIM),
    )  # fmt: skip


def paged_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attend with one query per decoding request. Query and result: [decodes, heads, head_dim]."""
    batch, heads, _dim = query.shape
    width = meta.page_table.shape[1] * meta.page_size
    seen = width if meta.window is None else min(width, meta.window)
    size = split_size(batch * keys.shape[0], seen)
    splits, value_dim = -(-seen // size), values.shape[-1]
    partial_lse = query.new_empty((batch, heads, splits), dtype=torch.float32)
    partial = query.new_empty((batch, heads, splits, value_dim), dtype=torch.float32)
    shape = constants(query, keys, values, meta.page_size)
    window_decode_kernel[(batch, keys.shape[0], splits)](
        query, keys, values, meta.page_table, meta.seq_lens, partial, partial_lse,
        query.stride(0), query.stride(1), keys.stride(0), values.stride(0),
        meta.page_table.stride(0), float(scale), float(meta.softcap or 1.0), splits, size,
        WINDOW=meta.window or 0, HAS_CAP=meta.softcap is not None,
        **shape, **tiles(keys, shape)["decode"],
    )  # fmt: skip
    if meta.sinks is not None:
        sinks = meta.sinks.float()[None, :, None].expand(batch, -1, 1)
        partial_lse = torch.cat([partial_lse, sinks], dim=-1)
    shares = partial_lse.softmax(dim=-1)[:, :, None, :splits]  # [B, heads, 1, splits]
    return (shares @ partial).squeeze(2).to(query.dtype)
