"""Top-k, top-p and min-p: set the logits of tokens that a request must not draw to -inf.

Top-p is defined by a sorted list: the tokens from the most likely to the least likely, lower ids
first among equals. A token is kept if all tokens before it have together less than top_p of the
probability. Here nothing is sorted. A probability is an integer, so every order of addition gives
the same sum, and the last token to keep is found by its logit, a few bits at a time:

    bits of -logit  0 10000010 0101... . The first 11 bits sort the tokens into 2048 buckets. The
    sums of the buckets say in which one the last token is. The next 10 bits divide this bucket into
    1024 buckets, and the last 10 bits divide one of these.

That is a radix search. All shapes are fixed, and the host waits for nothing: a GPU can run it
without a gap. The result is exactly that of the sorted list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..request import Request

# The weight of the most likely token. The weights of 2**20 tokens have a sum below 2**63. A token
# that is 2**42 times less likely has weight 0: it is kept only if nothing limits the probability.
ONE = 2**42
OFF = torch.iinfo(torch.int64).max
# Bits of the search, from the highest to the lowest: 31, because -logit is never negative.
DIGITS = (11, 10, 10)


@dataclass
class Filters:
    """Top-k, top-p and min-p of the rows of a batch. Each is off in some rows."""

    top_k: torch.Tensor  # [B] int64; 0 if off
    top_p: torch.Tensor  # [B] float64; 1 if off
    log_min_p: torch.Tensor  # [B] float32; -inf if off
    k_rows: torch.Tensor | None  # [m] int64: the rows with top-k, and perhaps top-p; None: no row
    p_rows: torch.Tensor | None  # [m] int64: the rows with top-p alone; None: no row
    largest_k: int
    uses_top_p: bool  # in any row

    @classmethod
    def from_requests(cls, requests: Sequence[Request], device: torch.device | str) -> Filters:
        def tensor(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def rows(found: list[int]) -> torch.Tensor | None:
            return tensor(found, torch.int64) if found else None

        params = [request.params for request in requests]
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        return cls(
            top_k=tensor([p.top_k for p in params], torch.int64),
            top_p=tensor([p.top_p for p in params], torch.float64),
            log_min_p=tensor(log_min_p, torch.float32),
            k_rows=rows([i for i, p in enumerate(params) if p.top_k]),
            p_rows=rows([i for i, p in enumerate(params) if p.top_p < 1 and not p.top_k]),
            largest_k=max(p.top_k for p in params),
            uses_top_p=any(p.top_p < 1 for p in params),
        )


def apply_filters(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Apply top-k, then top-p to the remaining tokens, then min-p (the order of Hugging Face).

    logits: [B, V] float32; the largest of a row is 0. Top-k and top-p both keep the most likely
    tokens; of equally likely tokens, lower ids are kept.
    """
    keep = logits >= filters.log_min_p[:, None]  # relative to the most likely token, with logit 0
    if (rows := filters.k_rows) is not None:
        k, p = filters.top_k[rows][:, None], filters.top_p[rows][:, None]
        keep[rows] &= _kept_by_top_k(logits[rows], k, p, filters.largest_k)
    if (rows := filters.p_rows) is not None:
        keep[rows] &= _kept_by_top_p(logits[rows], filters.top_p[rows][:, None])
    return logits.masked_fill(~keep, -torch.inf)


def _kept_by_top_k(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest: int
) -> torch.Tensor:
    """Return which tokens are kept: [m, V] bool. Only the most likely ones are sorted.

    top_k, top_p: [m, 1]. largest: the largest top_k.
    """
    top = logits.topk(min(largest, logits.shape[-1]), dim=-1).values  # descending
    in_top_k = torch.arange(top.shape[-1], device=top.device) < top_k
    weight = weights(top).masked_fill(~in_top_k, 0)
    before = weight.cumsum(dim=-1) - weight  # of all more likely tokens
    in_nucleus = before < _share(weight.sum(dim=-1, keepdim=True), top_p)
    count = (in_top_k & in_nucleus).sum(dim=-1, keepdim=True).clamp(min=1)  # [m, 1]
    smallest = top.gather(-1, count - 1)
    return _down_to(logits, smallest, count - (top > smallest).sum(dim=-1, keepdim=True))


def _kept_by_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return which tokens are kept: [m, V] bool. top_p: [m, 1]."""
    weight = weights(logits)  # [m, V]
    share = _share(weight.sum(dim=-1, keepdim=True), top_p)  # [m, 1]
    keys = logits.abs().view(torch.int32)  # a more likely token has a smaller key
    lowest = torch.zeros_like(share, dtype=torch.int32)  # of the bucket to divide
    bits = sum(DIGITS)
    for digit in DIGITS:
        bits -= digit
        # Bucket 0 has all smaller keys, the last one all larger keys.
        bucket = ((keys - (lowest - 2**bits)) >> bits).clamp_(0, 2**digit + 1).long()  # [m, V]
        sums = weight.new_zeros(len(weight), 2**digit + 2).scatter_add_(-1, bucket, weight)
        until = sums.cumsum(dim=-1)
        found = torch.searchsorted(until, share).clamp_(1, 2**digit)  # [m, 1]
        lowest = lowest + ((found - 1) << bits).int()
    # The last bucket that was found has one key: equally likely tokens, lower ids first.
    ties = (keys == lowest).sum(dim=-1, keepdim=True).clamp(min=1)
    of_one = (sums.gather(-1, found) // ties).clamp(min=1)
    missing = share - until.gather(-1, found - 1)
    return _down_to(logits, -lowest.view(torch.float32), -(-missing // of_one))


def weights(logits: torch.Tensor) -> torch.Tensor:
    """Return probabilities as integers, relative to `ONE` for the most likely token: int64.

    Multiplying by a power of two is exact, so an integer is a float32 that was rounded down. An
    invalid row, which contains NaN, gets any weights: its token is not used.
    """
    return (logits.exp() * ONE).nan_to_num_(0.0).long()


def _share(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the weight that the tokens before a kept token must not reach: int64, like `total`."""
    share = (total.double() * top_p).ceil().long().minimum(total)
    return torch.where(top_p < 1, share, OFF)


def _down_to(logits: torch.Tensor, smallest: torch.Tensor, num_ties: torch.Tensor) -> torch.Tensor:
    """Mark the logits above `smallest`, and the first `num_ties` logits that are equal to it."""
    ties = logits == smallest
    return (logits > smallest) | (ties & (ties.cumsum(dim=-1) <= num_ties))
