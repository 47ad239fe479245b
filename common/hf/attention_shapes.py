"""What a model passes to its attention function: the shapes of keys and values, and arguments."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .shared import attention_switched
from .slot_cache import LayerKV

NAME = "ladder_shapes"
OTHER_ATTENTION = "attention that is not called through transformers' AttentionInterface"
# Keyword arguments that change what attention computes, each with the name of its feature.
FEATURES = {
    "s_aux": "attention sinks",
    "softcap": "attention soft-capping",
    "position_bias": "attention with a position bias",
    "attention_mask": "attention with a mask of its own",
}
VARIANTS = ("softcap", "s_aux")  # those of them that `LayerKV.variants` names


@dataclass
class SeenAttention:
    """The calls of the attention function in one forward."""

    layers: dict[int, LayerKV] = field(default_factory=dict)
    served: Collection[str] = ()  # keyword arguments that are no reason to refuse the model
    calls: Counter[int] = field(default_factory=Counter)  # per layer
    features: list[str] = field(default_factory=list)

    @property
    def suspect(self) -> str | None:
        """Return the feature that would explain a failed probe, in words; None if there is none."""
        if not self.layers:
            return OTHER_ATTENTION
        if self.features:
            return self.features[0]
        if max(self.calls.values()) > 1:
            return "layers that call attention more than once in a forward"
        return None


class _Threads(threading.local):
    """What the newest forward showed. Each thread may examine a different model."""

    def __init__(self) -> None:
        self.seen = SeenAttention()


_threads = _Threads()


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Record the call, then compute attention as `sdpa` does."""
    seen = _threads.seen
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    given = {**kwargs, "attention_mask": attention_mask}
    named = [name for name in FEATURES if given.get(name) is not None]
    variants = tuple(name for name in named if name in VARIANTS)
    window = kwargs.get("sliding_window")
    seen.layers[layer] = LayerKV(key.shape[1], key.shape[3], value.shape[3], window, variants)
    seen.calls[layer] += 1
    seen.features += [FEATURES[name] for name in named if name not in seen.served]
    # `sdpa` raises for a soft cap. The caller needs the arguments, and not the result.
    known = {k: v for k, v in kwargs.items() if k not in VARIANTS or k not in seen.served}
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **known)
    return output, None


AttentionInterface.register(NAME, _attend)


def supports_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether a model declares that it calls the attention function registered for it."""
    return bool(getattr(model, "_supports_attention_backend", True))


@torch.inference_mode()
def seen_attention(model: PreTrainedModel, served: Collection[str] = ()) -> SeenAttention:
    """Run one token through the model and return what its attention function received.

    served: keyword arguments that the engine obeys.
    """
    seen = _threads.seen = SeenAttention(served=served)
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    with attention_switched(model, NAME):
        model(input_ids=token, position_ids=token - 1, use_cache=False)
    return seen
