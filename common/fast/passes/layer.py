"""A decoder layer as one function.

Between its products, a layer computes little. But this work is spread over eleven modules and about
fifty operations, and the overhead of a call is the same for one token as for a thousand tokens.
With one token in a step, the calls took half as long as the products. Here a layer of the usual
kind (Llama's) consists of three calls:

    x -> norm -> qkv -> rotate q and k | attention | -> o, + x -> norm -> gate, up -> down, + x

The parts before and after attention are compiled (`cpu_kernels/layer.c`) if the products are. On
CUDA they have fused Triton kernels. Otherwise they are a few operations of torch. Hooks on the
layer itself still run. Hooks on modules inside the layer do not run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .forwards import Forwards
from .hf_cache import append
from .layer_parts import CompiledParts, Parts, TorchParts, TritonParts, products_of
from .replace import probe, same, subclass

CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # Qwen3 has them
KNOWN_NAMES = {  # the names that attention uses in the models that a joined layer can replace
    name
    for attention in (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
    for name in attention.forward.__code__.co_names
}


class _DecoderLayer(nn.Module):
    """A mixin for a decoder layer."""

    parts: Parts
    window: int | None = None  # of the attention, in tokens; the attention function gets it
    may_trim = False  # whether only the LM head reads the output of the layer (`last.py`)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        tokens_to_keep: torch.Tensor | slice | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the layer, with the arguments that Hugging Face passes to a layer.

        hidden_states: [B, T, hidden]. Returns the same shape. If `may_trim` is set, only the tokens
        to keep are in the result.
        """
        parts, x = self.parts, hidden_states
        attention = parts.attention
        if position_embeddings is None or position_embeddings[0].shape[-1] != attention.head_dim:
            return super().forward(  # no rotary embedding, or one for only a part of each head
                hidden_states, attention_mask=attention_mask, position_ids=position_ids,
                past_key_values=past_key_values, use_cache=use_cache,
                position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
        forward = parts.forwards(position_embeddings, x.shape[:2])
        q, k, v = parts.before(x, forward)
        if past_key_values is not None:
            k, v = append(past_key_values, k, v, attention.layer_idx)
        attended, _ = forward.attend(
            attention, q, k, v, attention_mask, dropout=0.0, scaling=attention.scaling,
            position_ids=position_ids, use_cache=use_cache, sliding_window=self.window, **kwargs,
        )  # fmt: skip
        if self.may_trim and tokens_to_keep is not None:
            attended, x = attended[:, tokens_to_keep], x[:, tokens_to_keep]
        return parts.after(attended, x)


def joined_layers(model: nn.Module) -> list[Any]:
    """Return the joined decoder layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, _DecoderLayer)]


def join_layers(model: nn.Module) -> int:
    """Make each decoder layer with merged products one function; return their number."""
    layers = [m for m in model.modules() if {n for n, _ in m.named_children()} == CHILDREN]
    if not layers:
        return 0
    attention: Any = layers[0].self_attn
    file = getattr(type(attention).forward, "__globals__", {})
    if "eager_attention_forward" not in file:
        return 0
    forwards = Forwards(attention.config, file["eager_attention_forward"])
    return sum(_join(layer, forwards) for layer in layers)


def _join(layer: Any, forwards: Forwards) -> bool:
    if not _is_usual(layer):
        return False
    original: Any = type(layer)
    qkv, _ = products_of(layer)
    # Small numbers: the residual must not hide what the rest of the layer computes.
    x = 0.05 * probe(2, 5, qkv.linear.in_features, like=qkv.linear.weight)
    angle = probe(2, 5, layer.self_attn.head_dim // 2, like=x).repeat(1, 1, 2)
    given = {"position_embeddings": (angle.cos(), angle.sin())}
    kinds: list[type[CompiledParts | TorchParts]]
    kinds = [CompiledParts, TorchParts] if x.is_cpu else [TritonParts]
    for kind in kinds:
        try:  # a layer may have other arguments or other parts than Llama's
            theirs = layer(x, **given)
            layer.__dict__["parts"] = kind(layer, forwards)
            layer.__dict__["window"] = _window_of(layer.self_attn)
            layer.__class__ = subclass(_DecoderLayer, original)
            largest = theirs.abs().max()
            if same(layer(x, **given) / largest, theirs / largest):
                return True
        except Exception:
            pass
        layer.__class__ = original
        layer.__dict__.pop("parts", None)
        layer.__dict__.pop("window", None)
    return False


def _window_of(attention: Any) -> int | None:
    """Return the window that an attention module takes from its configuration; None for none."""
    if "sliding_window" not in type(attention).forward.__code__.co_consts:
        return None
    window: int | None = getattr(attention.config, "sliding_window", None)
    return window


def _is_usual(layer: Any) -> bool:
    """Return whether a layer has the parts of Llama's, is on a CPU or GPU, with merged products."""
    names = {name for name, _ in layer.self_attn.named_children()}
    if names not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS):
        return False
    # A short trial may miss, for example, a clamp of large numbers. The names in the code show it.
    code = getattr(type(layer.self_attn).forward, "__code__", None)
    if code is None or not set(code.co_names) <= KNOWN_NAMES:
        return False
    windowed = getattr(layer.self_attn, "sliding_window", None) is not None
    merged = products_of(layer)
    devices = ("cpu", "cuda")
    return not windowed and all(p and p.linear.weight.device.type in devices for p in merged)
