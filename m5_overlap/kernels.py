"""Attention through the page table as Triton kernels, for GPUs. `triton_ops.py` launches them.

All kernels follow these rules:

- The launch grid depends on shapes only, never on lengths, so that a CUDA graph can replay it.
- A tile holds the query heads of one KV head, so keys and values are read once for all of them.
- Loads past the end of a context are masked: that memory was perhaps never written.
- Page ids are widened to 64 bits before they become addresses. Scores and softmax are float32.
- Triton compiles a variant of a kernel for numbers that are 1 or multiples of 16. Numbers that
  change from step to step are in `CHANGING`, so that no step waits for a compiler.

Decode is split along the context (Flash-Decoding: Dao et al., 2023), with the online softmax of
FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

import triton
import triton.language as tl

MIN_BLOCK = 16  # the rows of a product on tensor cores, and the fewest numbers tl.dot adds up
CHANGING = ["table_stride", "num_splits", "split_size"]
CHANGING += ["first_request", "num_requests", "first_token"]


def tiles(group: int, block_dim: int, itemsize: int, capability: int) -> dict[str, dict[str, int]]:
    """Return tile sizes, warps and stages of the kernels, as chosen by what they compile to.

    Decode reads ahead: with five stages, one tile is computed while the next one is loaded. In a
    prefill with 128 rows, each warp has rows of its own, so a maximum of a row needs no other warp.

    group: query heads of a KV head. block_dim: head dimension, rounded up, of keys or values: the
    larger one. itemsize: bytes a value. capability: of the GPU; 90 stands for 9.0. Before 8.0 (a T4
    has 7.5), there are no asynchronous copies for more stages, and 64 KiB of shared memory.
    """
    heads = 1 << (group - 1).bit_length()  # without tensor cores, each row costs arithmetic
    padded = max(MIN_BLOCK, heads)
    if itemsize == 4:  # float32 uses no tensor cores: the products need registers
        shape = {"TILE": 32, "num_stages": 2} if capability >= 80 else {"TILE": 16, "num_stages": 1}
        warps = 4 if heads < MIN_BLOCK else 8  # more threads would compute the same scores
        decode = {"ROWS": heads, "num_warps": warps, **shape}
        return {"decode": decode, "prefill": {"ROWS": padded, "num_warps": 8, **shape}}
    if capability < 80:  # Triton uses no tensor cores here
        rows, tile = (64, 32) if block_dim <= 64 else (32, 32 if block_dim <= 128 else 16)
        warps = 4 if heads * block_dim <= MIN_BLOCK * 128 else 8
        return {
            "decode": {"ROWS": heads, "TILE": 32, "num_warps": warps, "num_stages": 1},
            "prefill": {"ROWS": max(rows, heads), "TILE": tile, "num_warps": 8, "num_stages": 1},
        }
    rows, tile = 128, 64
    if block_dim > 128:  # 128 rows of wide heads need the shared memory of an H100 or a B200
        rows, tile = (128, 32) if 90 <= capability < 120 else (32, 64)
    return {
        "decode": {"ROWS": padded, "TILE": 32, "num_warps": 4 + heads // 128 * 4, "num_stages": 5},
        "prefill": {"ROWS": max(rows, heads), "TILE": tile, "num_warps": 8, "num_stages": 2},
    }


@triton.jit
def _slots(page_table, row_start, positions, mask, PAGE_SIZE: tl.constexpr):
    """Return the slots of positions, int64, through one row of the page table."""
    pages = tl.load(page_table + row_start + positions // PAGE_SIZE, mask=mask, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit
def store_kernel(
    key, value, keys, values, slot_mapping,
    key_stride_t, key_stride_h, value_stride_t, value_stride_h, keys_stride_h, values_stride_h,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the key and the value of one head of one token per program."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    dim = tl.arange(0, BLOCK_D)
    k = tl.load(key + token * key_stride_t + head * key_stride_h + dim, mask=dim < KEY_DIM)
    tl.store(keys + head * keys_stride_h + slot * KEY_DIM + dim, k, mask=dim < KEY_DIM)
    v = tl.load(value + token * value_stride_t + head * value_stride_h + dim, mask=dim < VALUE_DIM)
    tl.store(values + head * values_stride_h + slot * VALUE_DIM + dim, v, mask=dim < VALUE_DIM)


@triton.jit
def _attend(q, k, v, visible, maximum, total, acc, scale, PRECISION: tl.constexpr):
    """Do one step of the online softmax: q [M, D] against a tile k [N, D], v [N, E].

    visible: the scores that count, [M, N] or a shape that broadcasts to it. maximum, total: [M] of
    the scores so far. acc: [M, E], not yet divided by total.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row without a visible score has the maximum -inf, and -inf - -inf would be NaN.
    shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    weights = tl.exp(scores - shift[:, None])
    decay = tl.exp(maximum - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_maximum, total, acc


@triton.jit(do_not_specialize=CHANGING)
def decode_kernel(
    query, keys, values, page_table, seq_lens, partial, partial_lse,
    query_stride_b, query_stride_h, keys_stride_h, values_stride_h, table_stride,
    scale, num_splits, split_size,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with the heads of one KV head of one request, over one split, per program.

    The grid is (B, KV heads, num_splits). Read: query [B, heads, KEY_DIM], keys and values
    [KV heads, slots, KEY_DIM or VALUE_DIM], page_table [B, P] and seq_lens [B], both int32.
    Written: partial [B, heads, num_splits, VALUE_DIM] and partial_lse [B, heads, num_splits].

    A stride is the distance, in entries, to the next request (`_b`), head (`_h`) or row of the
    table. Everything without a stride is contiguous: the last dimension of query, keys and values
    within a head, and all of seq_lens, partial and partial_lse.

    ROWS, BLOCK_K and BLOCK_V are block sizes: powers of two, at least GROUP (query heads of a KV
    head), KEY_DIM and VALUE_DIM. A program reads split_size positions, TILE of them at a time.
    """
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request)
    start = split * split_size
    if start >= length:
        return
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
    end = tl.minimum(start + split_size, length)
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
        maximum, total, acc = _attend(
            q, k, v, inside[None, :], maximum, total, acc, scale, PRECISION
        )
    num_heads = tl.num_programs(1) * GROUP
    row = (request * num_heads + head) * num_splits + split  # [B, heads, splits]
    tl.store(partial_lse + row, maximum + tl.log(total), mask=group < GROUP)
    tl.store(
        partial + row[:, None] * VALUE_DIM + v_dim[None, :], acc / total[:, None],
        mask=(group[:, None] < GROUP) & (v_dim[None, :] < VALUE_DIM),
    )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def reduce_kernel(
    partial, partial_lse, output, seq_lens, num_splits, split_size,
    output_stride_b, output_stride_h, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head of one request per program."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + request)
    row = (request * tl.num_programs(1) + head) * num_splits
    dim = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    maximum = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for split in range(tl.cdiv(length, split_size)):
        lse = tl.load(partial_lse + row + split)
        part = tl.load(partial + (row + split) * VALUE_DIM + dim, mask=dim < VALUE_DIM, other=0.0)
        new_maximum = tl.maximum(maximum, lse)
        decay, weight = tl.exp(maximum - new_maximum), tl.exp(lse - new_maximum)
        acc = acc * decay + part * weight
        total = total * decay + weight
        maximum = new_maximum
    place = output + request * output_stride_b + head * output_stride_h + dim
    tl.store(place, (acc / total).to(output.dtype.element_ty), mask=dim < VALUE_DIM)


@triton.jit(do_not_specialize=CHANGING)
def prefill_kernel(
    query, keys, values, output, page_table, query_start_loc, seq_lens,
    query_stride_t, query_stride_h, output_stride_t, output_stride_h,
    keys_stride_h, values_stride_h, table_stride,
    scale, first_request, num_requests, first_token,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS // GROUP query tokens of one request and the heads of one KV head.

        rows of the tile   token 0: heads 0 1 2 | token 1: heads 0 1 2 | ...      GROUP = 3

    Requests have different numbers of tokens, but the grid must not depend on them. With Q tokens
    per block, request i begins at block i + (tokens before it) // Q. At most one block per request
    is empty.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts of a prompt first
    kv_head = tl.program_id(1).to(tl.int64)
    # Binary search for the last request that begins at this block or before it.
    low, high = 0, num_requests
    while low < high - 1:
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
    # No query of this tile sees positions after its own last token.
    end = length - num_queries + tl.minimum(first_query + QUERIES, num_queries)
    for first in range(0, end, TILE):
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
        visible = valid[:, None] & (positions[None, :] <= position[:, None])
        maximum, total, acc = _attend(q, k, v, visible, maximum, total, acc, scale, PRECISION)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        output + place[:, None] * output_stride_t + head[:, None] * output_stride_h + v_dim,
        result.to(output.dtype.element_ty), mask=valid[:, None] & (v_dim[None, :] < VALUE_DIM),
    )  # fmt: skip
