"""Top-k, top-p and min-p: set the logits of tokens that a request must not draw to -inf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..request import Request


@dataclass
class Filters:
    """Top-k, top-p and min-p of the n rows that use any of them. Other rows are not changed."""

    rows: torch.Tensor  # [n] int64: the indices of these rows in the batch
    top_k: torch.Tensor  # [n, 1] int64; the largest int64 if off
    top_p: torch.Tensor  # [n, 1] float64; infinite if off
    log_min_p: torch.Tensor  # [n, 1] float32; -inf if off
    max_top_k: int | None  # the largest top_k; None if a row must sort the whole vocabulary

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], device: torch.device | str
    ) -> Filters | None:
        rows = [i for i, request in enumerate(requests) if request.params.is_filtered]
        if not rows:
            return None
        params = [requests[i].params for i in rows]
        sorts = [p for p in params if p.top_k or p.top_p < 1]
        whole = any(not p.top_k for p in sorts)
        off = torch.iinfo(torch.int64).max
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        return cls(
            rows=torch.tensor(rows, device=device),
            top_k=torch.tensor([[p.top_k or off] for p in params], device=device),
            top_p=torch.tensor(
                [[p.top_p if p.top_p < 1 else math.inf] for p in params],
                dtype=torch.float64,
                device=device,
            ),
            log_min_p=torch.tensor([[x] for x in log_min_p], dtype=torch.float32, device=device),
            max_top_k=None if whole else max((p.top_k for p in sorts), default=0),
        )


def apply_filters(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Apply top-k, then top-p to the remaining tokens, then min-p (the order of Hugging Face).

    logits: [n, V] float32; the largest of a row is 0. Top-k and top-p both keep the most likely
    tokens. Sorting finds the last token to keep; of equally likely tokens, lower ids are kept.
    """
    vocab_size = logits.shape[-1]
    width = vocab_size if filters.max_top_k is None else min(filters.max_top_k, vocab_size)
    keep = logits >= filters.log_min_p  # relative to the most likely token, which has logit 0
    if width > 0:
        top = logits.topk(width, dim=-1).values  # [n, width], descending
        rank = torch.arange(width, device=logits.device)
        top = top.masked_fill(rank >= filters.top_k, -torch.inf)
        probs = top.double().softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # probability of all more likely tokens
        in_nucleus = (before < filters.top_p) & (rank < filters.top_k)
        # Rows with min-p alone keep all tokens here, although other rows' top_k limits the sorting.
        count = in_nucleus.sum(dim=-1, keepdim=True).clamp(min=1)  # [n, 1] number of tokens kept
        keep &= _largest(logits, top.gather(-1, count - 1), count) | _keeps_all(filters)
    return logits.masked_fill(~keep, -torch.inf)


def _keeps_all(filters: Filters) -> torch.Tensor:
    """Return the rows that have neither top-k nor top-p: [n, 1] bool."""
    return (filters.top_k == torch.iinfo(torch.int64).max) & filters.top_p.isinf()


def _largest(logits: torch.Tensor, smallest: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mark the `count` largest logits of each row, down to `smallest`: [n, V] bool."""
    above = logits > smallest
    ties = logits == smallest
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= room))
