"""Attention through the page tables of groups of layers: each layer uses that of its group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface

from .m5_attention import (
    NAME,
    PagedBatch,
    paged_decode,
    paged_prefill,
    store_kv,
    use_paged_attention,
)
from .m5_attention import AttentionMetadata as M5AttentionMetadata
from .m5_attention import paged_attention as m5_paged_attention

__all__ = [
    "NAME",
    "AttentionMetadata",
    "PagedBatch",
    "paged_attention",
    "paged_decode",
    "paged_prefill",
    "store_kv",
    "use_paged_attention",
]


@dataclass
class AttentionMetadata(M5AttentionMetadata):
    """Where the tokens of one step lie in a group, and what else a layer of the group needs."""

    window: int | None = None  # a query sees that many tokens, itself included. None: all
    windows: list[AttentionMetadata] = field(default_factory=list)  # of the groups with windows
    seen_slots: dict[int, torch.Tensor] = field(default_factory=dict)  # see `hybrid_attention.py`
    softcap: float | None = None  # of the layer that is computed
    sinks: torch.Tensor | None = None  # [heads], of this layer, too


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    paged: PagedBatch | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, in its group. Hugging Face calls this function."""
    if paged is not None:
        assert isinstance(paged.metadata, AttentionMetadata)
        group = paged.pool.group_of[int(module.layer_idx)]  # type: ignore[arg-type]
        meta = [paged.metadata, *paged.metadata.windows][group]
        if softcap is not None or s_aux is not None:
            meta = replace(meta, softcap=softcap, sinks=s_aux)
        paged = replace(paged, metadata=meta)
    return m5_paged_attention(module, query, key, value, attention_mask, paged=paged, **kwargs)


AttentionInterface.register(NAME, paged_attention)  # instead of m5's
