"""Find features that an engine cannot serve, by name: in a model's configuration, in its parts, and
in what it passes to its attention function.

A probe decides whether a model is served (`probe.py`). `unsupported_feature` refuses a model before
it, because a probe of a few tokens, or one in low precision, may not see such a feature.
`feature_of` and `SeenAttention` name the cause of a failed probe.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .probe import LayerKV, SlotCache
from .shared import attention_switched

ATTENTION_LAYERS = {
    "full_attention", "attention", "global",
    "sliding_attention", "local", "chunked_attention",  # the size of the window decides
}  # fmt: skip
# Attention or its scale changes from this many tokens: the field in a configuration, the feature.
BEGINS_LATER = {
    "attention_chunk_size": "chunked attention",
    "floor_scale": "temperature-tuned attention",
    "index_topk": "sparse attention, over the best of all tokens",
}
RECORDED = "ladder_shapes"
OTHER_ATTENTION = "attention that is not called through transformers' AttentionInterface"
# Keyword arguments that change what attention computes, each with the name of its feature.
ARGUMENTS = {
    "s_aux": "attention sinks",
    "softcap": "attention soft-capping",
    "position_bias": "attention with a position bias",
    "attention_mask": "attention with a mask of its own",
}
VARIANTS = ("softcap", "s_aux")  # those of them that `LayerKV.variants` names


def unsupported_feature(
    model: PreTrainedModel, max_model_len: int, served: Collection[str] = ()
) -> str | None:
    """Return the first feature in a configuration that would change the answer, or None.

    Only models with full causal attention over up to `max_model_len` tokens pass. served: keyword
    arguments of Hugging Face's attention functions that the engine obeys, and other types of layers
    that it computes.
    """
    config = model.config.get_text_config()
    window = None if "sliding_window" in served else window_of(config)
    if window is not None and window[1] < max_model_len:
        name, size = window
        return f"sliding-window attention ({name}={size}, max_model_len={max_model_len})"
    if feature := _other_layers(config, served):
        return feature
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap and "softcap" not in served:
        return f"attention soft-capping (attn_logit_softcapping={cap})"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "ALiBi position bias"
    if "s_aux" not in served and (feature := _sinks(model)):
        return feature
    return _later(config, max_model_len) or length_dependent_rope(config, max_model_len)


def window_of(config: PretrainedConfig) -> tuple[str, int] | None:
    """Return the name and the size of a sliding or local window; None if no layer has one."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if layer_types is not None and not {"sliding_attention", "local"} & set(layer_types):
        return None
    for name in ("sliding_window", "window_size", "local_attention"):
        if isinstance(size := getattr(config, name, None), int):
            return name, size
    return None


def _later(
    config: PretrainedConfig, max_model_len: int, names: Iterable[str] = BEGINS_LATER
) -> str | None:
    for name in names:
        feature, size = BEGINS_LATER[name], getattr(config, name, None)
        if name == "floor_scale" and not getattr(config, "attn_temperature_tuning", False):
            continue
        if isinstance(size, int) and size < max_model_len:
            return f"{feature} ({name}={size}, max_model_len={max_model_len})"
    return None


def unsupported_by_own_cache(model: PreTrainedModel, max_model_len: int) -> str | None:
    """Return a feature that makes Hugging Face's own cache change the answer; None for none."""
    config = model.config.get_text_config()
    # With a cache, the best tokens are chosen after different rounding. The probe may not show it.
    sparse = _later(config, max_model_len, ("index_topk",))
    return sparse or length_dependent_rope(config, max_model_len)


def length_dependent_rope(config: PretrainedConfig, max_model_len: int) -> str | None:
    """Return a RoPE scaling with frequencies that depend on the longest position in a batch.

    With such a scaling, the answer to a request depends on its neighbours. Returns a description,
    or None if the model has no such scaling.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        if rope_type not in ("dynamic", "longrope"):
            continue
        original = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_model_len > original:
            return f"batch-dependent RoPE scaling (rope_type={rope_type} beyond {original} tokens)"
    return None


def feature_of(model: PreTrainedModel, cause: Exception) -> str:
    """Return the first feature of a model that explains why it failed a probe with `cause`."""
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        return "recurrent state (more of a request than keys and values)"
    if feature := _other_layers(config) or _sinks(model):
        return feature
    if not _is_causal(model):
        return "attention to later tokens (it is not causal, or not configured as a decoder)"
    if (window := window_of(config)) is not None:
        return f"windowed attention ({window[0]}={window[1]})"
    parameters = inspect.signature(type(model).forward).parameters
    if "past_key_values" not in parameters:
        return "no KV cache of the usual kind (its forward takes no past_key_values)"
    if "position_ids" not in parameters:
        return "positions from the length of the cache (its forward takes no position_ids)"
    if SlotCache.__name__ in str(cause):
        return "a forward that needs Hugging Face's own cache"
    if not _counts_from_zero(model):
        return "positions of its own (with position_ids from 0 on, its answers are others)"
    return "a forward that ignores part of its KV cache, 4-D attention mask or position_ids"


def _other_layers(config: PretrainedConfig, served: Collection[str] = ()) -> str | None:
    other = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS - set(served)
    return f"layers of type {', '.join(sorted(other))}" if other else None


def _sinks(model: PreTrainedModel) -> str | None:
    names = [name for name, _ in model.named_parameters() if "sink" in name.rsplit(".", 1)[-1]]
    return f"attention sinks ({names[0]})" if names else None


@torch.inference_mode()
def _is_causal(model: PreTrainedModel) -> bool:
    """Return whether the logits after three tokens are independent of the tokens after them."""
    return _agree(model, [5, 9, 7, 3, 2], [5, 9, 7, 8, 4])


@torch.inference_mode()
def _counts_from_zero(model: PreTrainedModel) -> bool:
    """Return whether the model, without `position_ids`, uses the positions 0, 1, 2, and so on."""
    positions = torch.arange(3, device=model.device)[None]
    return _agree(model, [5, 9, 7], [5, 9, 7], position_ids=positions)


def _agree(model: PreTrainedModel, one: list[int], other: list[int], **given: Any) -> bool:
    """Return whether the logits after the third token agree.

    given: arguments of the forward of `other` only.
    """

    def logits(tokens: list[int], **given: Any) -> torch.Tensor:
        ids = torch.tensor([tokens], device=model.device)
        return model(ids, use_cache=False, **given).logits[0, 2].float()

    try:
        ours, theirs = logits(one), logits(other, **given)
    except Exception:
        return True  # the model does not accept this call
    return bool((ours - theirs).abs().max() <= 1e-2 * ours.abs().max())


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
    named = [name for name in ARGUMENTS if given.get(name) is not None]
    variants = tuple(name for name in named if name in VARIANTS)
    window = kwargs.get("sliding_window")
    seen.layers[layer] = LayerKV(key.shape[1], key.shape[3], value.shape[3], window, variants)
    seen.calls[layer] += 1
    seen.features += [ARGUMENTS[name] for name in named if name not in seen.served]
    # `sdpa` raises for a soft cap. The caller needs the arguments, and not the result.
    known = {k: v for k, v in kwargs.items() if k not in VARIANTS or k not in seen.served}
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **known)
    return output, None


AttentionInterface.register(RECORDED, _attend)


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
    with attention_switched(model, RECORDED):
        model(input_ids=token, position_ids=token - 1, use_cache=False)
    return seen
