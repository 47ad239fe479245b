"""Choose tokens with a few Triton kernels, for CUDA: the tokens of `draws.choose_in_torch`.

    scan    a program for each block of a row: the largest logit, its token, the sum of weights
    draw    a program for each row: finds the block by these sums, then the token in the block

With top-k, top-p or min-p, the kernels of `filter_kernels.py` do the sums again in between, of the
tokens that are left. Sums of a block are float32 here and float64 in torch, so a token may be
another one if its random number is within some 1e-6 of a border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .draws import DrawParams
from .filter_kernels import (
    BLOCK,
    COLUMNS,
    LAST,
    TIES,
    keep_kernel,
    key_of,
    largest_of,
    last_kept,
    scaled_logits,
)


@triton.jit
def scan_kernel(
    logits, temperature, maxima, tokens, sums, row_stride, num_tokens, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the largest logit of a block, its token, and the sum of weights relative to it.

    The grid is (B, blocks). Written: [B, blocks]. The largest is NaN if a logit is NaN or inf.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * row_stride + token
    x = tl.load(place, mask=token < num_tokens, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, axis=0)
    first = tl.min(tl.where(x == largest, token, num_tokens - 1), axis=0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp(tl.div_rn(x - shift, tl.load(temperature + row))), axis=0)
    is_invalid = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
    place = row * tl.num_programs(1) + block
    tl.store(maxima + place, tl.where(is_invalid, float("nan"), largest))
    tl.store(tokens + place, first)
    tl.store(sums + place, total)


@triton.jit
def draw_kernel(
    logits, temperature, greedy, uniforms, maxima, tokens, sums, search, log_min_p, ties,
    token_ids, is_valid, row_stride, num_tokens, num_blocks,
    IS_FILTERED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write a token of a row, and whether the row is valid: [B]. The grid is (B,)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    is_block, place = block < num_blocks, row * num_blocks + block
    maximum = tl.load(maxima + place, mask=is_block, other=-float("inf"))
    largest = largest_of(maxima, row, num_blocks, BLOCKS)
    valid = largest > -float("inf")  # NaN is not
    first = tl.min(tl.where(maximum == largest, block, num_blocks - 1), axis=0)
    tl.store(is_valid + row, valid)
    if tl.load(greedy + row) | (valid == 0):
        tl.store(token_ids + row, tl.load(tokens + row * num_blocks + first).to(tl.int64))
        return
    total = tl.load(sums + place, mask=is_block, other=0.0).to(tl.float64)
    if IS_FILTERED:
        last = tl.load(search + row * COLUMNS + LAST).to(tl.int32)
        of_last = tl.exp(-last.to(tl.float32, bitcast=True)).to(tl.float64)
        kept_ties = tl.load(search + row * COLUMNS + TIES)
        count = tl.load(ties + place, mask=is_block, other=0).to(tl.int64)
        ties_before = tl.cumsum(count, axis=0) - count
        kept = tl.maximum(tl.minimum(kept_ties - ties_before, count), 0)
        total += tl.where(kept > 0, of_last * kept.to(tl.float64), 0.0)
    else:  # relative to the largest of its block
        total *= tl.exp(tl.div_rn(maximum - largest, tl.load(temperature + row))).to(tl.float64)
    until = tl.cumsum(total, axis=0)
    threshold = tl.load(uniforms + row) * tl.max(until, axis=0)
    chosen = tl.min(tl.where((until > threshold) & (total > 0), block, num_blocks - 1), axis=0)
    rest = threshold - tl.sum(tl.where(block < chosen, total, 0.0), axis=0)
    token = chosen * BLOCK + tl.arange(0, BLOCK)
    scaled = scaled_logits(logits, row, token, largest, temperature, row_stride, num_tokens)
    weight = tl.exp(scaled)
    if IS_FILTERED:
        key, is_likely = key_of(scaled), scaled >= tl.load(log_min_p + row)
        is_tie = is_likely & (key == last)
        rank = tl.cumsum(is_tie.to(tl.int32), axis=0)
        rank += tl.sum(tl.where(block == chosen, ties_before, 0), axis=0).to(tl.int32)
        weight = tl.where((is_likely & (key < last)) | (is_tie & (rank <= kept_ties)), weight, 0.0)
    until = tl.cumsum(weight.to(tl.float64), axis=0)
    # Both sums of a block are rounded, so what is left may be the whole sum of the block or more.
    rest = tl.minimum(rest, tl.max(until, axis=0) * (1 - 2.0**-53))
    drawn = tl.min(tl.where((until > rest) & (weight > 0), token, num_tokens - 1), axis=0)
    tl.store(token_ids + row, drawn.to(tl.int64))


def choose(logits: torch.Tensor, draws: DrawParams) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draws.choose_in_torch`. The last dimension of `logits` is contiguous."""
    batch, num_tokens = logits.shape
    num_blocks = -(-num_tokens // BLOCK)
    sizes = {"BLOCK": BLOCK, "BLOCKS": 1 << (num_blocks - 1).bit_length()}
    grid, row_stride, temperature = (batch, num_blocks), logits.stride(0), draws.temperature
    maxima, sums = logits.new_empty(2, *grid, dtype=torch.float32)
    tokens = logits.new_empty(grid, dtype=torch.int32)
    token_ids = logits.new_empty(batch, dtype=torch.int64)
    is_valid = logits.new_empty(batch, dtype=torch.bool)
    with torch.cuda.device_of(logits):  # Triton launches on the current GPU
        scan_kernel[grid](
            logits, temperature, maxima, tokens, sums, row_stride, num_tokens, BLOCK=BLOCK
        )  # fmt: skip
        search, log_min_p, ties = maxima, maxima, tokens  # without filters, nothing is read there
        if (filters := draws.filters) is not None:
            search = last_kept(logits, temperature, maxima, filters, grid, sizes)
            log_min_p, ties = filters.log_min_p, torch.empty_like(tokens)
            keep_kernel[grid](
                logits, temperature, maxima, search, log_min_p, sums, ties,
                row_stride, num_tokens, num_blocks, **sizes,
            )  # fmt: skip
        draw_kernel[(batch,)](
            logits, temperature, draws.greedy, draws.uniforms, maxima, tokens, sums,
            search, log_min_p, ties, token_ids, is_valid, row_stride, num_tokens, num_blocks,
            IS_FILTERED=filters is not None, **sizes,
        )  # fmt: skip
    return token_ids, is_valid
