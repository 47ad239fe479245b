"""Attention with windows, soft caps and sinks, in plain torch, one request after the other.

softcap: a score is softcap * tanh(score / softcap), after the scale and before the mask.
sinks: [heads] one more logit in each softmax, which belongs to no token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import scaled_dot_product_attention

from common.hf.support import additive_mask

from .attention import AttentionMetadata, store_kv

__all__ = ["paged_decode", "paged_prefill", "store_kv"]


def paged_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attend with one query per decoding request. Query and result: [decodes, heads, head_dim]."""
    requests = range(meta.num_decodes)
    return _attend_requests(requests, query, keys, values, meta, scale)


def paged_prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attend with the queries of all chunks. Query and result: [tokens, heads, head_dim]."""
    requests = range(meta.num_decodes, len(meta.seq_lens_cpu))
    return _attend_requests(requests, query, keys, values, meta, scale)


def _attend_requests(
    requests: Iterable[int], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    meta: AttentionMetadata, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return the results of some requests of a step."""
    rules = (meta.window, scale, meta.softcap, meta.sinks)
    repeats = query.shape[1] // keys.shape[0]
    outputs, start = [], 0
    for request in requests:
        end, slots = start + meta.query_lens_cpu[request], seen_slots(meta, request)
        k, v = (
            memory.flatten(1, 2).index_select(1, slots).repeat_interleave(repeats, dim=0)
            for memory in (keys, values)
        )  # [heads, context, head_dim]
        queries = query[start:end].transpose(0, 1)  # [heads, n, head_dim]
        outputs.append(attend(queries, k, v, *rules).transpose(0, 1))
        start = end
    return torch.cat(outputs)


def seen_slots(meta: AttentionMetadata, request: int) -> torch.Tensor:
    """Return the slots of the tokens that the queries of a request see, [context].

    Only these may be read: a page before the window may belong to another request now.
    """
    if request not in meta.seen_slots:
        end = meta.seq_lens_cpu[request]
        first_query = end - meta.query_lens_cpu[request]
        start = 0 if meta.window is None else max(0, first_query - meta.window + 1)
        positions = torch.arange(start, end, device=meta.page_table.device)
        pages = meta.page_table[request, positions // meta.page_size].long()
        meta.seen_slots[request] = pages * meta.page_size + positions % meta.page_size
    return meta.seen_slots[request]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None,
    scale: float, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Let the last n of S tokens attend up to themselves, each from the start of its window.

    q and result: [heads, n, head_dim]; k and v: [heads, S, head_dim].
    """
    positions = torch.arange(k.shape[1], device=q.device)
    distance = positions[k.shape[1] - q.shape[1] :, None] - positions  # [n, S]
    bias = additive_mask((distance >= 0) & (distance < (window or k.shape[1])), q.dtype)
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale  # [heads, n, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    return scores.softmax(dim=-1)[..., : k.shape[1]].to(v.dtype) @ v
