"""Data that is the same for all layers of a forward, computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cpu_attention import is_runnable
from ..cpu_kernels import Heads
from .hf_cache import CacheAttention
from .rotary import signed


@dataclass(frozen=True)
class Forward:
    """Data that is the same for all layers of a forward."""

    embeddings: Any  # cos and sin, as the model computed them: [B or 1, T or 1, head_dim]
    shape: torch.Size  # [B, T]
    cos: torch.Tensor  # [B, T, 1, head_dim]
    signed_sin: torch.Tensor  # [B, T, 1, head_dim]
    attend: Callable[..., Any]
    made: dict[tuple[int, ...], Heads] = field(default_factory=dict)

    def heads(self, sizes: tuple[int, ...]) -> Heads:
        """Return memory for q, k and v. All layers with these numbers of heads share it."""
        heads = self.made.get(sizes)
        if heads is None:
            heads = self.made[sizes] = Heads.of(self.cos, self.signed_sin, sizes)
        return heads


class Forwards:
    """The data of the latest forward. Threads may share it: a mismatch is recomputed."""

    def __init__(self, config: PretrainedConfig, eager_attention: Callable[..., Any]) -> None:
        """eager_attention: the eager attention function of the modeling file."""
        self.config = config
        self.eager_attention = eager_attention
        self._latest: Forward | None = None

    def __call__(self, embeddings: Any, shape: torch.Size) -> Forward:
        """Return the data for this forward, from the cache if possible. shape: [B, T]."""
        latest = self._latest
        if latest is None or latest.embeddings is not embeddings or latest.shape != shape:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, self.eager_attention
            )
            cos = embeddings[0]
            if attend is sdpa_attention_forward and is_runnable(cos.device, cos.dtype):
                attend = CacheAttention()
            cos, sin = (x.expand(*shape, -1).unsqueeze(2).contiguous() for x in embeddings)
            latest = self._latest = Forward(embeddings, shape, cos, signed(sin), attend)
        return latest
