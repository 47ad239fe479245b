"""Which models an engine can serve that brings its own KV cache, and what their KV looks like.

A model that would give silently wrong answers is refused when it is loaded, with an error that
names the feature. Features are recognised in two ways: by what the configuration says, and by
running the model on three tokens and comparing, which finds what no configuration admits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

PROBE_TOKENS = [3, 1, 2]


class UnsupportedModelError(ValueError):
    """The model has a feature that this engine would compute wrongly; the message names it."""


@dataclass(frozen=True)
class LayerKV:
    """The shape of one layer's keys and values for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


def require_full_attention(model: PreTrainedModel, max_model_len: int) -> list[LayerKV]:
    """Refuse what is not plain causal attention over up to `max_model_len` tokens.

    Returns the KV shape of each layer. Raises `UnsupportedModelError`.
    """
    name = model.config.name_or_path or type(model).__name__
    if feature := unsupported_feature(model.config, max_model_len):
        raise UnsupportedModelError(f"{name}: {feature} is not supported by this engine")
    try:
        layers, logits = _probe(model)
    except Exception as cause:
        raise UnsupportedModelError(
            f"{name}: its forward does not accept another's KV cache, 4-D attention mask and "
            f"position_ids ({type(cause).__name__}: {cause})"
        ) from cause
    require_same_logits(
        model, logits, "ignores part of a KV cache, 4-D attention mask or position_ids"
    )
    return layers


@torch.inference_mode()
def require_same_logits(model: PreTrainedModel, logits: torch.Tensor, failing: str) -> None:
    """Compare the logits [V] that an engine computed after `PROBE_TOKENS` with the plain forward's.

    Raises `UnsupportedModelError`, saying what the model's forward seems to be `failing`.
    """
    tokens = torch.tensor([PROBE_TOKENS], device=model.device)
    expected = model(tokens, use_cache=False).logits[0, -1].float()
    error = float((logits.float() - expected).abs().max() / expected.abs().max())
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    if not error < tolerance:
        raise UnsupportedModelError(
            f"{model.config.name_or_path or type(model).__name__}: its forward {failing}: "
            f"logits are off by {error:.1%} of the largest"
        )


def unsupported_feature(config: PretrainedConfig, max_model_len: int) -> str | None:
    """The first feature of a configuration that would change the answer, in words."""
    config = config.get_text_config()
    if (window := _sliding_window(config)) is not None and window < max_model_len:
        return f"sliding-window attention (sliding_window={window}, max_model_len={max_model_len})"
    other = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",  # judged by the window's size
    }
    if other:
        return f"layers of type {', '.join(sorted(other))}"
    if getattr(config, "attn_logit_softcapping", None):
        return f"attention soft-capping (attn_logit_softcapping={config.attn_logit_softcapping})"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "ALiBi position bias"
    return _length_dependent_rope(config, max_model_len)


def _sliding_window(config: PretrainedConfig) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def _length_dependent_rope(config: PretrainedConfig, max_model_len: int) -> str | None:
    """RoPE with frequencies that depend on the longest position in the batch, on neighbours."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        original = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope_type in ("dynamic", "longrope") and max_model_len > original:
            return f"batch-dependent RoPE scaling (rope_type={rope_type} beyond {original} tokens)"
    return None


class _RecordingCache:
    """A KV cache that keeps what it is given, after one slot that nobody must read."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value: [1, kv_heads, T, head_dim]; returns all so far, junk first."""
        old_key, old_value = self.layers.get(layer_idx) or (
            torch.full_like(key[:, :, :1], 7.0),
            torch.full_like(value[:, :, :1], 7.0),
        )
        self.layers[layer_idx] = (
            torch.cat([old_key, key], dim=2),
            torch.cat([old_value, value], dim=2),
        )
        return self.layers[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx][0].shape[2] - 1 if layer_idx in self.layers else 0


@torch.inference_mode()
def _probe(model: PreTrainedModel) -> tuple[list[LayerKV], torch.Tensor]:
    """Two tokens and then one through a cache of ours: the layers' shapes, the last logits [V]."""
    tokens = torch.tensor([PROBE_TOKENS], device=model.device)
    cache = _RecordingCache()
    for start, end in ((0, 2), (2, 3)):
        positions = torch.arange(start, end, device=model.device)
        slots = torch.arange(-1, end, device=model.device)  # slot -1 is the junk
        visible = (slots >= 0) & (slots <= positions[:, None])  # [T, S]
        logits = model(
            tokens[:, start:end],
            position_ids=positions[None],
            attention_mask=additive_mask(visible[None, None], model.dtype),
            past_key_values=cache,
            use_cache=True,
        ).logits
    layers = [cache.layers[index] for index in range(len(cache.layers))]
    if not layers:
        raise ValueError("no layer used the cache")
    return [LayerKV(k.shape[1], k.shape[3], v.shape[3]) for k, v in layers], logits[0, -1]


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask (True: may be attended to) as what every implementation adds to its scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)
