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
    DIM: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Pack the key, or the value, of one head of one token per program.

    lines: [KV heads, slots, 4 + DIM] int8, or uint8 in FP8. scales: the same memory as float32.
    lines_stride_h: bytes from one head to the next.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = head * lines_stride_h + tl.load(slot_mapping + token) * (4 + DIM)
    dim = tl.arange(0, BLOCK)
    place = x + token * stride_t + head * stride_h + dim
    number = tl.load(place, mask=dim < DIM, other=0.0).to(tl.float32)
    # A number that is not finite makes the scale NaN, and so the whole line.
    scale = tl.div_rn(tl.max(tl.abs(number)), LARGEST) + tl.sum(number * 0.0)
    number = tl.div_rn(number, tl.where(scale > 0.0, scale, 1.0))
    number = tl.minimum(tl.maximum(number, -LARGEST), LARGEST)
    packed = _to_fp8(number) if FP8 else _round(number).to(tl.int8)
    tl.store(scales + line // 4, scale)
    tl.store(lines + line + 4 + dim, packed, mask=dim < DIM)


@triton.jit
def store_int4_kernel(
    x, lines, halves, slot_mapping, stride_t, stride_h, lines_stride_h,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same in 4 bits. lines: uint8. halves: the same memory as int16. BLOCK: for DIM / 2."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = head * lines_stride_h + tl.load(slot_mapping + token) * (4 + DIM // 2)
    dim = tl.arange(0, BLOCK)
    inside = dim < DIM // 2
    place = x + token * stride_t + head * stride_h + dim
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    # A number that is not finite makes `low` NaN, and so the whole line.
    unusual = tl.sum(first * 0.0 + second * 0.0) + 0.0  # not -0
    lowest = tl.min(tl.where(inside, tl.minimum(first, second), float("inf")))
    highest = tl.max(tl.where(inside, tl.maximum(first, second), -float("inf")))
    low = _to_bfloat16(lowest + unusual)
    scale = _to_bfloat16(tl.div_rn(highest - _from_bfloat16(low), 15.0))
    divisor = tl.where(_from_bfloat16(scale) > 0.0, _from_bfloat16(scale), 1.0)
    first = tl.div_rn(first - _from_bfloat16(low), divisor)
    second = tl.div_rn(second - _from_bfloat16(low), divisor)
    # NaN has no integer: its step is 0.
    first = _round(tl.minimum(tl.where(first > 0.0, first, 0.0), 15.0)).to(tl.int32)
    second = _round(tl.minimum(tl.where(second > 0.0, second, 0.0), 15.0)).to(tl.int32)
    tl.store(halves + line // 2, scale.to(tl.int16))
    tl.store(halves + line // 2 + 1, low.to(tl.int16))
    tl.store(lines + line + 4 + dim, (first | (second << 4)).to(tl.uint8), mask=inside)


@triton.jit
def _to_bfloat16(x):
    """Return the bits of the nearest bfloat16 number, int32. A half goes to the even one."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _from_bfloat16(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    """Round to the nearest integer, and halves to even ones: 1.5 * 2^23 has no place for more."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_fp8(x):
    """Return the byte of the nearest e4m3 number, uint8. The size of x is at most 448.

    This needs integers only, because older GPUs have no instructions for e4m3.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # 20 bits of the fraction go, and the exponents differ by 120.
    size = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = _round(tl.abs(x) * 512.0).to(tl.int32)  # below 2^-6: multiples of 2^-9
    return (tl.where(tl.abs(x) < 0.015625, small, size) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_fp8(byte):
    """Return e4m3 numbers as float32, exactly. NaN is left out: its line's scale is NaN."""
    size = byte.to(tl.int32) & 0x7F
    number = ((size + 960) << 20).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) / 512.0, number)
    return tl.where(byte.to(tl.int32) >= 0x80, -number, number)


@triton.jit
def _unpack(lines, scales, line, inside, dim, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Return the numbers of a tile of lines, [TILE, dims] float32. line: where each begins."""
    byte = dim % (DIM // 2) if FORMAT == "int4" else dim
    numbers = tl.load(
        lines + line[:, None] + 4 + byte[None, :],
        mask=inside[:, None] & (dim[None, :] < DIM), other=0,
    )  # fmt: skip
    if FORMAT == "int4":
        steps = (numbers.to(tl.int32) >> (dim // (DIM // 2) * 4)[None, :]) & 15
        scale = _from_bfloat16(tl.load(scales + line // 2, mask=inside, other=0))
        low = _from_bfloat16(tl.load(scales + line // 2 + 1, mask=inside, other=0))
        result = low[:, None] + steps.to(tl.float32) * scale[:, None]
    else:
        scale = tl.load(scales + line // 4, mask=inside, other=0.0)
        result = _from_fp8(numbers) if FORMAT == "fp8" else numbers.to(tl.float32)
        result *= scale[:, None]
    return result


@triton.jit(do_not_specialize=["table_stride", "first_request", "num_requests", "first_token"])
def attend_kernel(
    query, keys, values, key_scales, value_scales, output,
    page_table, query_start_loc, seq_lens,
    query_stride_t, query_stride_h, output_stride_t, output_stride_h,
    keys_stride_h, values_stride_h, table_stride,
    scale, first_request, num_requests, first_token,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS // GROUP query tokens of one request and the heads of one KV head.

    The arguments and the grid are those of `prefill_kernel` in `kernels.py`. keys, values: bytes,
    and so are keys_stride_h and values_stride_h. key_scales and value_scales: the same memory as
    float32, or as int16 in 4 bits.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" else 1
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
        key_lines = kv_head * keys_stride_h + slots * (4 + KEY_DIM // PER_BYTE)
        value_lines = kv_head * values_stride_h + slots * (4 + VALUE_DIM // PER_BYTE)
        k = _unpack(keys, key_scales, key_lines, inside, k_dim, KEY_DIM, FORMAT)
        v = _unpack(values, value_scales, value_lines, inside, v_dim, VALUE_DIM, FORMAT)
        k, v = k.to(q.dtype), v.to(q.dtype)
        visible = valid[:, None] & (positions[None, :] <= position[:, None])
        maximum, total, acc = _attend(q, k, v, visible, maximum, total, acc, scale, PRECISION)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        output + place[:, None] * output_stride_t + head[:, None] * output_stride_h + v_dim,
        result.to(output.dtype.element_ty), mask=valid[:, None] & (v_dim[None, :] < VALUE_DIM),
    )  # fmt: skip
