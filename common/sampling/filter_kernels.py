"""Top-k, top-p and min-p as Triton kernels, for CUDA: the tokens that `filters.py` keeps.

The last token that is kept is searched as there: integers are added up by the digits of -logit,
first for top-k, and then for top-p among the k tokens. `count` adds them up, and `find` chooses a
digit. Then `keep` sums the weights of the tokens that are left. Integers have the same sum in any
order, so no result depends on the order of the additions, or on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .filters import DIGITS, ONE, Filters

BLOCK = 1024  # tokens of a program
BUCKETS = tl.constexpr(2 ** max(DIGITS))
OF_MOST_LIKELY = tl.constexpr(float(ONE))
NO_LIMIT = 2**31 - 1  # larger than any key
CHANGING = ["shift", "size", "is_first"]  # Triton would compile a variant for each digit
# The columns of `search`, int64: where the range of keys begins that is searched now, what the
# tokens before it add up to, the sum to reach; then the result, the key of the last token that is
# kept, and how many tokens with this key are kept.
LOWEST, BEFORE, TARGET, LAST, TIES, COLUMNS = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5))


@triton.jit
def largest_of(maxima, row, num_blocks, BLOCKS: tl.constexpr):
    """Return the largest logit of a row; NaN if the row is invalid."""
    block = tl.arange(0, BLOCKS)
    values = tl.load(
        maxima + row * num_blocks + block, mask=block < num_blocks, other=-float("inf")
    )
    is_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    return tl.where(is_nan, float("nan"), tl.max(values, axis=0))


@triton.jit
def scaled_logits(logits, row, token, largest, temperature, row_stride, num_tokens):
    """Return logits of a row with its largest shifted to 0, over the temperature: float32."""
    place = logits + row * row_stride + token
    x = tl.load(place, mask=token < num_tokens, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x - largest, tl.load(temperature + row))


@triton.jit
def key_of(scaled):
    """Return the bits of -logit: a more likely token has a smaller key."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _weight(scaled):
    """Return a probability as an integer, relative to `ONE` for the most likely token."""
    return (tl.exp(scaled) * OF_MOST_LIKELY).to(tl.int64)


@triton.jit
def _is_off(limits, row, IS_TOP_K: tl.constexpr):
    limit = tl.load(limits + row)
    return limit == 0 if IS_TOP_K else limit >= 1


@triton.jit(do_not_specialize=CHANGING)
def count_kernel(
    logits, temperature, maxima, search, limits, buckets, row_stride, num_tokens, num_blocks,
    shift, size, IS_TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add a block of tokens to the buckets [B, BUCKETS], by one digit of their keys.

    The grid is (B, blocks). There are `size` buckets with `2 ** shift` keys each. limits: [B], of
    the filter. For top-k, a token counts as 1. For top-p, it counts by its probability, and only if
    top-k has kept it.
    """
    row = tl.program_id(0).to(tl.int64)
    if _is_off(limits, row, IS_TOP_K):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest = largest_of(maxima, row, num_blocks, BLOCKS)
    scaled = scaled_logits(logits, row, token, largest, temperature, row_stride, num_tokens)
    key = key_of(scaled)
    lowest = tl.load(search + row * COLUMNS + LOWEST).to(tl.int32)
    bucket = (key - lowest) >> shift
    is_counted = (token < num_tokens) & (key >= lowest) & (bucket < size)
    amount = tl.full([BLOCK], 1, tl.int64)
    if not IS_TOP_K:
        last = tl.load(search + row * COLUMNS + LAST).to(tl.int32)
        amount = _weight(scaled)
        is_counted &= (key < last) & (amount > 0)
        ties = tl.load(search + row * COLUMNS + TIES)  # 0 if there is no top-k
        place = (last - lowest) >> shift
        if (tl.program_id(1) == 0) & (ties > 0) & (last >= lowest) & (place < size):
            of_last = _weight(-last.to(tl.float32, bitcast=True))
            tl.atomic_add(buckets + row * BUCKETS + place, ties * of_last)
    tl.atomic_add(buckets + row * BUCKETS + bucket, amount, mask=is_counted)


@triton.jit(do_not_specialize=CHANGING)
def find_kernel(search, limits, buckets, shift, size, is_first, IS_TOP_K: tl.constexpr):
    """Choose the first bucket with which the sum is reached. After the last digit, it is a key.

    The grid is (B,). is_first: whether this is the first digit, with all tokens in the buckets.
    """
    row = tl.program_id(0).to(tl.int64)
    if _is_off(limits, row, IS_TOP_K):
        return
    index = tl.arange(0, BUCKETS)
    amounts = tl.load(buckets + row * BUCKETS + index)
    mine = search + row * COLUMNS
    lowest, before, target = tl.load(mine + LOWEST), tl.load(mine + BEFORE), tl.load(mine + TARGET)
    if is_first:
        total, limit = tl.sum(amounts, axis=0), tl.load(limits + row)
        if not IS_TOP_K:
            limit = tl.ceil(total.to(tl.float64) * limit).to(tl.int64)
        target = tl.minimum(limit, total)
        tl.store(mine + TARGET, target)
    until = before + tl.cumsum(amounts, axis=0)
    found = tl.minimum(tl.sum((until < target).to(tl.int64), axis=0), size - 1)
    lowest += found << shift
    before += tl.sum(tl.where(index < found, amounts, 0), axis=0)
    if shift == 0:
        of_one = tl.full([], 1, tl.int64)
        if not IS_TOP_K:
            of_one = tl.maximum(_weight(-lowest.to(tl.int32).to(tl.float32, bitcast=True)), 1)
        tl.store(mine + LAST, lowest)
        tl.store(mine + TIES, tl.maximum((target - before + of_one - 1) // of_one, 1))
        lowest, before = lowest * 0, before * 0  # where the next filter begins
    tl.store(mine + LOWEST, lowest)
    tl.store(mine + BEFORE, before)


@triton.jit
def keep_kernel(
    logits, temperature, maxima, search, log_min_p, sums, ties, row_stride, num_tokens, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the sum of weights of a block without its last key, and how often it has that key.

    The grid is (B, blocks). Written: [B, blocks].
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    largest = largest_of(maxima, row, num_blocks, BLOCKS)
    scaled = scaled_logits(logits, row, token, largest, temperature, row_stride, num_tokens)
    key, last = key_of(scaled), tl.load(search + row * COLUMNS + LAST).to(tl.int32)
    is_likely = scaled >= tl.load(log_min_p + row)
    place = row * num_blocks + block
    tl.store(sums + place, tl.sum(tl.where(is_likely & (key < last), tl.exp(scaled), 0.0), axis=0))
    tl.store(ties + place, tl.sum((is_likely & (key == last)).to(tl.int32), axis=0))


def last_kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    maxima: torch.Tensor,
    filters: Filters,
    grid: tuple[int, int],
    sizes: dict[str, int],
) -> torch.Tensor:
    """Return the last token that top-k and top-p keep: `search`, [B, COLUMNS] int64."""
    search = logits.new_zeros(grid[0], COLUMNS.value, dtype=torch.int64)
    search[:, LAST.value] = NO_LIMIT
    limits = [filters.top_k] if filters.k_rows is not None else []
    limits += [filters.top_p] if filters.uses_top_p else []
    shape = len(limits) * len(DIGITS), grid[0], BUCKETS.value
    buckets = iter(logits.new_zeros(shape, dtype=torch.int64))
    for limit in limits:
        shift = sum(DIGITS)
        for number, digit in enumerate(DIGITS):
            shift -= digit
            amounts, is_top_k = next(buckets), limit is filters.top_k
            count_kernel[grid](
                logits, temperature, maxima, search, limit, amounts, logits.stride(0),
                logits.shape[1], grid[1], shift, 2**digit, IS_TOP_K=is_top_k, **sizes,
            )  # fmt: skip
            find_kernel[grid[:1]](
                search, limit, amounts, shift, 2**digit, int(number == 0),
                IS_TOP_K=is_top_k,
            )  # fmt: skip
    return search
