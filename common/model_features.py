"""The features that an engine cannot serve, by name: from a model's configuration and its parts."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_LAYERS = {"full_attention", "attention", "global", "sliding_attention", "local"}
# Beyond so many tokens, attention or its scale changes: the name in a configuration, the feature.
BEGINS_LATER = {
    "attention_chunk_size": "chunked attention",
    "floor_scale": "temperature-tuned attention",
    "index_topk": "sparse attention, over the best of all tokens",
}


def unsupported_feature(model: PreTrainedModel, max_model_len: int) -> str | None:
    """Return what a configuration says that would change the answer, in words; None for nothing.

    Only full causal attention passes, over up to `max_model_len` tokens.
    """
    config = model.config.get_text_config()
    if (window := _window(config)) is not None and window[1] < max_model_len:
        name, size = window
        return f"sliding-window attention ({name}={size}, max_model_len={max_model_len})"
    if other := set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS:
        if other <= {"chunked_attention"}:
            size = getattr(config, "attention_chunk_size", None)
            return _later(config, max_model_len) if size else None
        return f"layers of type {', '.join(sorted(other))}"
    if cap := getattr(config, "attn_logit_softcapping", None):
        return f"attention soft-capping (attn_logit_softcapping={cap})"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "ALiBi position bias"
    if sinks := _parameter(model, "sink"):
        return f"attention sinks ({sinks})"
    return _later(config, max_model_len) or length_dependent_rope(config, max_model_len)


def _window(config: PretrainedConfig) -> tuple[str, int] | None:
    """The name and the size of a sliding or local window, where a layer has one."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if layer_types is not None and not {"sliding_attention", "local"} & set(layer_types):
        return None
    for name in ("sliding_window", "window_size", "local_attention"):
        if isinstance(size := getattr(config, name, None), int):
            return name, size
    return None


def _later(config: PretrainedConfig, max_model_len: int) -> str | None:
    for name, feature in BEGINS_LATER.items():
        size = getattr(config, name, None)
        if name == "floor_scale" and not getattr(config, "attn_temperature_tuning", False):
            continue
        if isinstance(size, int) and size < max_model_len:
            return f"{feature} ({name}={size}, max_model_len={max_model_len})"
    return None


def length_dependent_rope(config: PretrainedConfig, max_model_len: int) -> str | None:
    """Say whether RoPE's frequencies depend on the longest position of a batch: on neighbours."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        original = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope_type in ("dynamic", "longrope") and max_model_len > original:
            return f"batch-dependent RoPE scaling (rope_type={rope_type} beyond {original} tokens)"
    return None


def feature_of(model: PreTrainedModel) -> str:
    """Say why a model failed a probe: the first of its features that explains it."""
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        return "recurrent state (more of a request than keys and values)"
    if other := set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS:
        return f"layers of type {', '.join(sorted(other))}"
    if sinks := _parameter(model, "sink"):
        return f"attention sinks ({sinks})"
    if not _is_causal(model):
        return "attention to later tokens (it is not causal, or not configured as a decoder)"
    if (window := _window(config)) is not None:
        return f"windowed attention ({window[0]}={window[1]})"
    parameters = inspect.signature(type(model).forward).parameters
    if not {"past_key_values", "kwargs"} & set(parameters):
        return "a cache of another kind (its forward takes no past_key_values)"
    if "position_ids" not in parameters:
        return "positions from the length of the cache (its forward takes no position_ids)"
    return "a forward that ignores part of its KV cache, 4-D attention mask or position_ids"


def _parameter(model: PreTrainedModel, part: str) -> str | None:
    """The name of the first parameter whose own name has this in it."""
    names = (name for name, _ in model.named_parameters())
    return next((name for name in names if part in name.rsplit(".", 1)[-1]), None)


@torch.inference_mode()
def _is_causal(model: PreTrainedModel) -> bool:
    """Whether the logits after three tokens do not depend on the tokens behind them."""

    def logits(*tokens: int) -> Any:
        ids = torch.tensor([tokens], device=model.device)
        return model(ids, use_cache=False).logits[0, 2].float()

    try:
        one, other = logits(5, 9, 7, 3, 2), logits(5, 9, 7, 8, 4)
    except Exception:
        return True  # it cannot be asked
    return bool((one - other).abs().max() <= 5e-2 * one.abs().max())
