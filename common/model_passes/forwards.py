"""What is the same for all layers of a forward, made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .rotary import signed


class Forward(NamedTuple):
    """What is the same for all layers of a forward."""

    embeddings: Any  # cos and sin, as the model computed them: [B or 1, T or 1, head_dim]
    cos: torch.Tensor  # [B, T, 1, head_dim]
    signed_sin: torch.Tensor  # [B, T, 1, head_dim]
    attend: Callable[..., Any]


class Forwards:
    """The latest forward. Threads may share it: what is not theirs is made again."""

    def __init__(self, config: PretrainedConfig, eager_attention: Callable[..., Any]) -> None:
        """eager_attention: the modeling file's own."""
        self.config = config
        self.eager_attention = eager_attention
        self._latest: Forward | None = None

    def __call__(self, embeddings: Any, shape: torch.Size) -> Forward:
        """shape: [B, T]."""
        latest = self._latest
        if latest is None or latest.embeddings is not embeddings or latest.cos.shape[:2] != shape:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, self.eager_attention
            )
            cos, sin = (x.expand(*shape, -1).unsqueeze(2).contiguous() for x in embeddings)
            latest = self._latest = Forward(embeddings, cos, signed(sin), attend)
        return latest
