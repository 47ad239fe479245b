"""Attention in parts of the context, and how their results are combined (Flash-Decoding, Dao 2023).

A split is a table of positions, [P, L]: P parts of L positions. A part that is shorter is padded
with positions behind the context. No query sees these, and they add exact zeros.

    a context of 5, in parts of 4      0 1 2 3 | 4 . . .
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .attention import AttentionMetadata, store_kv

LENGTH = 16  # positions in a part of the fixed split
BLOCK = 16  # queries that are computed at once, so that the memory stays small
MOST_PARTS = 8  # of the context of a request that decodes alone
LOWEST = torch.finfo(torch.float32).min

# From the length of the context, the position of the first query, and the number of requests that
# decode together, to a table of positions.
Split = Callable[[int, int, int], torch.Tensor]


def fixed_split(context: int, first: int, num_requests: int) -> torch.Tensor:
    """Return parts of `LENGTH` positions, from position 0 on, [P, LENGTH].

    I2: the part of a position, and its place in the part, depend on the position alone. So the last
    part has `LENGTH` positions too, even if the context ends before.
    """
    num_parts = -(-context // LENGTH)
    return torch.arange(num_parts * LENGTH).view(num_parts, LENGTH)


def split_by_batch(context: int, first: int, num_requests: int) -> torch.Tensor:
    """Return more parts for fewer requests, so that all cores have work: not batch-invariant."""
    num_parts = max(1, MOST_PARTS // num_requests)
    length = -(-context // num_parts)
    return torch.arange(num_parts * length).view(num_parts, length)


def split_at_chunk(context: int, first: int, num_requests: int) -> torch.Tensor:
    """Return the cached prefix and the new chunk as two parts: not batch-invariant.

    An engine does this if one kernel attends to the pages, and another one to the new tokens.
    """
    length = max(first, context - first)
    parts = torch.full((2, length), context)  # behind the context: padding
    parts[0, :first] = torch.arange(first)
    parts[1, : context - first] = torch.arange(first, context)
    return parts if first else parts[1:]


@dataclass(frozen=True)
class SplitAttention:
    """Operations with the names and signatures of those in `attention.py`."""

    of_decodes: Split = fixed_split
    of_chunks: Split = fixed_split

    store_kv = staticmethod(store_kv)

    def paged_decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Attend with one query per decoding request. Query and result: [B, heads, head_dim].

        Shorter contexts have parts that are all padding.
        """
        count = meta.num_decodes
        context = max(meta.seq_lens_cpu[:count])
        split = self.of_decodes(context, context - 1, count)
        position = meta.seq_lens[:count, None].long() - 1  # [B, 1]
        pages = meta.page_table[:count]
        return _attend(query[:, None], keys, values, split, pages, position, meta, scale)[:, 0]

    def paged_prefill(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Attend with the queries of all chunks. Query and result: [tokens, heads, head_dim]."""
        outputs, start = [], 0
        for row in range(meta.num_decodes, len(meta.seq_lens_cpu)):
            count, context = meta.query_lens_cpu[row], meta.seq_lens_cpu[row]
            split = self.of_chunks(context, context - count, 1)
            pages = meta.page_table[row : row + 1]
            for begin in range(0, count, BLOCK):
                end = min(begin + BLOCK, count)
                q = query[None, start + begin : start + end]  # [1, n, heads, head_dim]
                position = torch.arange(context - count + begin, context - count + end)[None]
                parts = _attend(q, keys, values, split, pages, position, meta, scale)
                outputs.append(parts[0])
            start += count
        return torch.cat(outputs)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    split: torch.Tensor,
    pages: torch.Tensor,
    position: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with n queries of each of B requests: [B, n, heads, head_dim], and so the result.

    split: [P, L]. pages: [B, _], the page table. position: [B, n], of the queries. A product of
    torch would choose its kernel by n. Products of numbers, and sums over the last dimension, have
    one order.
    """
    kv_heads = keys.shape[0]
    seen = split <= position[..., None, None]  # [B, n, P, L]
    last = position.max(dim=1).values[:, None]  # [B, 1]
    places = torch.where(split.flatten() <= last, split.flatten(), 0)  # [B, P * L]
    slots = pages.gather(1, places // meta.page_size).long() * meta.page_size
    slots = slots + places % meta.page_size  # [B, P * L]
    k, v = (
        x.flatten(1, 2)[:, slots].transpose(0, 1).unflatten(2, split.shape) for x in (keys, values)
    )  # [B, kv_heads, P, L, head_dim]
    q = query.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, kv_heads, r, n, head_dim]
    scores = (q[:, :, :, :, None, None] * k[:, :, None, None]).contiguous().sum(dim=-1) * scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)  # [B, kv_heads, r, n, P, L]
    top = scores.amax(dim=-1).clamp(min=LOWEST)  # [B, kv_heads, r, n, P]
    weights = (scores - top[..., None]).exp()
    turned = v.transpose(3, 4)[:, :, None, None]  # [B, kv_heads, 1, 1, P, head_dim, L]
    sums = (weights[..., None, :] * turned).contiguous().sum(dim=-1)
    output = combine(top, weights.sum(dim=-1), sums)  # [B, kv_heads, r, n, head_dim]
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3)


def combine(top: torch.Tensor, totals: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the attention over all parts, [..., head_dim], from that over each of P parts.

    top: [..., P] the largest score of a part. totals: [..., P] the sums of `exp(score - top)`.
    sums: [..., P, head_dim] the sums of `exp(score - top) * value`. The parts are added one after
    the other, so that parts of padding at the end change nothing.
    """
    scales = (top - top.amax(dim=-1, keepdim=True)).exp()
    total, output = torch.zeros_like(totals[..., 0]), torch.zeros_like(sums[..., 0, :])
    for part in range(top.shape[-1]):
        total = total + totals[..., part] * scales[..., part]
        output = output + sums[..., part, :] * scales[..., part, None]
    return output / total[..., None]
