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
class TopK:
    """The rows with top-k. They may have top-p too, which then applies to the k tokens."""

    rows: torch.Tensor  # [m] int64: indices of the filtered rows
    top_k: torch.Tensor  # [m, 1] int64
    top_p: torch.Tensor  # [m, 1] float64; 1 if off
    largest: int  # the largest top_k of these rows

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Return which tokens are kept: [m, V] bool. Only the most likely ones are sorted."""
        top = logits.topk(min(self.largest, logits.shape[-1]), dim=-1).values  # descending
        in_top_k = torch.arange(top.shape[-1], device=top.device) < self.top_k
        weight = weights(top).masked_fill(~in_top_k, 0)
        before = weight.cumsum(dim=-1) - weight  # of all more likely tokens
        in_nucleus = before < _share(weight.sum(dim=-1, keepdim=True), self.top_p)
        count = (in_top_k & in_nucleus).sum(dim=-1, keepdim=True).clamp(min=1)  # [m, 1]
        smallest = top.gather(-1, count - 1)
        return _down_to(logits, smallest, count - (top > smallest).sum(dim=-1, keepdim=True))


@dataclass
class TopP:
    """The rows with top-p and without top-k."""

    rows: torch.Tensor  # [m] int64: indices of the filtered rows
    top_p: torch.Tensor  # [m, 1] float64

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Return which tokens are kept: [m, V] bool."""
        weight = weights(logits)  # [m, V]
        share = _share(weight.sum(dim=-1, keepdim=True), self.top_p)  # [m, 1]
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


@dataclass
class Filters:
    """Top-k, top-p and min-p of the n rows that use any of them. Other rows are not changed."""

    rows: torch.Tensor  # [n] int64: the indices of these rows in the batch
    log_min_p: torch.Tensor  # [n, 1] float32; -inf if off
    top_k: TopK | None
    top_p: TopP | None

    @classmethod
    def from_requests(cls, requests: Sequence[Request], device: torch.device | str) -> Filters:
        rows = [i for i, request in enumerate(requests) if request.params.is_filtered]

        def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        params = [requests[i].params for i in rows]
        with_k = [i for i, p in enumerate(params) if p.top_k]
        with_p = [i for i, p in enumerate(params) if p.top_p < 1 and not p.top_k]
        top_p = [p.top_p for p in params]
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        limits = [params[i].top_k for i in with_k]
        return cls(
            rows=torch.tensor(rows, device=device),
            log_min_p=column(log_min_p, torch.float32),
            top_k=TopK(
                torch.tensor(with_k, device=device),
                column(limits, torch.int64),
                column([top_p[i] for i in with_k], torch.float64),
                max(limits),
            ) if with_k else None,
            top_p=TopP(
                torch.tensor(with_p, device=device),
                column([top_p[i] for i in with_p], torch.float64),
            ) if with_p else None,
        )  # fmt: skip


def apply_filters(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Apply top-k, then top-p to the remaining tokens, then min-p (the order of Hugging Face).

    logits: [n, V] float32; the largest of a row is 0. Top-k and top-p both keep the most likely
    tokens; of equally likely tokens, lower ids are kept.
    """
    keep = logits >= filters.log_min_p  # relative to the most likely token, which has logit 0
    for part in (filters.top_k, filters.top_p):
        if part is not None:
            keep[part.rows] &= part.kept(logits[part.rows])
    return logits.masked_fill(~keep, -torch.inf)


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
