"""Attention to packed lines as Triton kernels: a tile is unpacked after it has been loaded.

A decode is a chunk of one token, and runs the same kernel. So the sums over a context have one
order, and a token that is computed again has the same numbers (I2). m5 also splits long contexts
among programs (Flash-Decoding). This kernel does not, so few requests do not fill a large GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import _attend, _slots


@triton.jit
def store_kernel(
    x, lines, scales, slot_mapping, stride_t, stride_h, lines_stride_h,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack the key, or the value, of one head of one token per program.

    lines: [KV heads, slots, 4 + DIM] int8. scales: the same memory as float32.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = head * lines_stride_h + tl.load(slot_mapping + token) * (4 + DIM)
    dim = tl.arange(0, BLOCK)
    place = x + token * stride_t + head * stride_h + dim
    number = tl.load(place, mask=dim < DIM, other=0.0).to(tl.float32)
    # A number that is not finite makes the scale NaN, and so the whole line.
    scale = tl.div_rn(tl.max(tl.abs(number)), 127.0) + tl.sum(number * 0.0)
    rounded = _round(tl.div_rn(number, tl.where(scale > 0.0, scale, 1.0)))
    rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    tl.store(scales + line // 4, scale)
    tl.store(lines + line + 4 + dim, rounded.to(tl.int8), mask=dim < DIM)


@triton.jit
def _round(x):
    """Round to the nearest integer, and halves to even ones: 1.5 * 2^23 has no place for more."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _unpack(lines, scales, line, inside, dim, DIM: tl.constexpr):
    """Return the numbers of a tile of lines, [TILE, dims] float32. line: where each begins."""
    scale = tl.load(scales + line // 4, mask=inside, other=0.0)
    numbers = tl.load(
        lines + line[:, None] + 4 + dim[None, :],
        mask=inside[:, None] & (dim[None, :] < DIM), other=0,
    )  # fmt: skip
    return numbers.to(tl.float32) * scale[:, None]


@triton.jit(do_not_specialize=["table_stride", "first_request", "num_requests", "first_token"])
def attend_kernel(
    query, keys, values, key_scales, value_scales, output,
    page_table, query_start_loc, seq_lens,
    query_stride_t, query_stride_h, output_stride_t, output_stride_h,
    keys_stride_h, values_stride_h, table_stride,
    scale, first_request, num_requests, first_token,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS // GROUP query tokens of one request and the heads of one KV head.

    The arguments and the grid are those of `prefill_kernel` in `kernels.py`. key_scales and
    value_scales: the memory of keys and values as float32.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    low, high = 0, num_requests
    while low < high - 1:  # the last request that begins at this block or before it
        middle = (low + high) // 2
        begin = tl.load(query_start_loc + first_request + middle) - first_token
        if begin // QUERIES + middle <= block:
            low = middle
        else:
            high = middle
    request = (first_request + low).to(tl.int64)
    begin = tl.load(query_start_loc + request) - first_token
    num_queries = tl.load(query_start_loc + request + 1) - first_token - begin
    length = tl.load(seq_lens + request)
    first_query = (block - begin // QUERIES - low) * QUERIES
    if first_query >= num_queries:
        return
    row = tl.arange(0, ROWS)
    token = first_query + row // GROUP  # index among the request's tokens of this step
    head = kv_head * GROUP + row % GROUP
    valid = (row < QUERIES * GROUP) & (token < num_queries)
    position = length - num_queries + token
    k_dim, v_dim = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    place = (begin + token).to(tl.int64)
    q = tl.load(
        query + place[:, None] * query_stride_t + head[:, None] * query_stride_h + k_dim[None, :],
        mask=valid[:, None] & (k_dim[None, :] < KEY_DIM), other=0.0,
    )  # fmt: skip
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    end = length - num_queries + tl.minimum(first_query + QUERIES, num_queries)
    for first in range(0, end, TILE):
        positions = first + tl.arange(0, TILE)
        inside = positions < end
        slots = _slots(page_table, request * table_stride, positions, inside, PAGE_SIZE)
        key_lines = kv_head * keys_stride_h + slots * (4 + KEY_DIM)
        value_lines = kv_head * values_stride_h + slots * (4 + VALUE_DIM)
        k = _unpack(keys, key_scales, key_lines, inside, k_dim, KEY_DIM).to(q.dtype)
        v = _unpack(values, value_scales, value_lines, inside, v_dim, VALUE_DIM).to(q.dtype)
        visible = valid[:, None] & (positions[None, :] <= position[:, None])
        maximum, total, acc = _attend(q, k, v, visible, maximum, total, acc, scale, PRECISION)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        output + place[:, None] * output_stride_t + head[:, None] * output_stride_h + v_dim,
        result.to(output.dtype.element_ty), mask=valid[:, None] & (v_dim[None, :] < VALUE_DIM),
    )  # fmt: skip
