"""A decoder layer as one function.

Between its products a layer does little, but what it does is spread over eleven modules and some
fifty operations, and a call costs the same for one token as for a thousand. At one token a step the
calls took half as long as the products. Here a layer of the usual kind (Llama's) calls the
functions of its parts directly, and looks at q, k and v as they left their product:

    x -> norm -> qkv -> turn q and k -> attention -> o, + x -> norm -> gate, up -> down, + x

Hooks on the layer itself still run; on modules inside of it they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .merge import SharedProduct
from .replace import probe, same, subclass
from .rotary import signed, turn

Function = Callable[[torch.Tensor], torch.Tensor]
CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # Qwen3 has them


class Forward(NamedTuple):
    """What is the same for all layers of a forward."""

    embeddings: Any  # cos and sin, as the model computed them: [B, T, head_dim]
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

    def __call__(self, embeddings: Any) -> Forward:
        latest = self._latest
        if latest is None or latest.embeddings is not embeddings:
            cos, sin = embeddings
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, self.eager_attention
            )
            latest = Forward(embeddings, cos.unsqueeze(2), signed(sin).unsqueeze(2), attend)
            self._latest = latest
        return latest


@dataclass
class Parts:
    """What a layer is made of: functions of [B, T, ...], and sizes."""

    input_norm: Function
    qkv: Function
    head_norms: tuple[Function, Function] | None  # of q and k, each head on its own
    forwards: Forwards
    attention: nn.Module  # an attention function is told which it is for
    output: Function
    mlp_norm: Function
    gate_up: Function
    activation: Function
    down: Function
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    gate_up_sizes: list[int]

    def turned(
        self, heads: torch.Tensor, forward: Forward
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """heads: [B, T, q + k + v heads, head_dim]. Returns q, k, v: [B, heads, T, head_dim]."""
        sizes = [self.num_heads, self.num_kv_heads]
        cos, signed_sin = forward.cos, forward.signed_sin
        if self.head_norms is None:  # q and k at once
            both, v = heads.split([sum(sizes), self.num_kv_heads], dim=2)
            q, k = turn(both, cos, signed_sin).transpose(1, 2).split(sizes, dim=1)
            return q, k, v.transpose(1, 2)
        q, k, v = heads.split([*sizes, self.num_kv_heads], dim=2)
        q, k = (
            turn(norm(x), cos, signed_sin) for norm, x in zip(self.head_norms, (q, k), strict=True)
        )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _DecoderLayer(nn.Module):
    """Mixed into a decoder layer."""

    parts: Parts

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states: [B, T, hidden]; returns the same shape. As Hugging Face calls a layer."""
        parts, x = self.parts, hidden_states
        if position_embeddings is None or position_embeddings[0].shape[-1] != parts.head_dim:
            return super().forward(  # no rotary embedding, or of a part of each head
                hidden_states, attention_mask, position_ids, past_key_values, use_cache,
                position_embeddings, **kwargs,
            )  # fmt: skip
        batch, num_tokens, _ = x.shape
        forward = parts.forwards(position_embeddings)
        heads = parts.qkv(parts.input_norm(x)).view(batch, num_tokens, -1, parts.head_dim)
        q, k, v = parts.turned(heads, forward)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, parts.attention.layer_idx)
        attended, _ = forward.attend(
            parts.attention, q, k, v, attention_mask, dropout=0.0, scaling=parts.scale,
            position_ids=position_ids, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        x = parts.output(attended.reshape(batch, num_tokens, -1)).add_(x)
        gate, up = parts.gate_up(parts.mlp_norm(x)).split(parts.gate_up_sizes, dim=-1)
        return parts.down(parts.activation(gate).mul_(up)).add_(x)


def join_layers(model: nn.Module) -> int:
    """Make one function of each decoder layer on CPU whose products are merged; how many."""
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
    parts = _parts(layer, forwards)
    if parts is None:
        return False
    x = probe(2, 5, layer.input_layernorm.weight.numel(), like=layer.input_layernorm.weight)
    angle = probe(2, 5, parts.head_dim // 2, like=x).repeat(1, 1, 2)
    given = {"position_embeddings": (angle.cos(), angle.sin())}
    original: Any = type(layer)
    try:
        theirs = layer(x, **given)
    except Exception:  # it wants to be called in another way than Llama's
        return False
    if not isinstance(theirs, torch.Tensor):
        return False
    layer.__class__ = subclass(_DecoderLayer, original)
    layer.__dict__["parts"] = parts
    largest = theirs.abs().max()
    if not same(layer(x, **given) / largest, theirs / largest):
        layer.__class__ = original
        del layer.__dict__["parts"]
        return False
    return True


def _parts(layer: Any, forwards: Forwards) -> Parts | None:
    """The parts of a layer that looks as Llama's do; None for another."""
    attention, mlp = layer.self_attn, layer.mlp
    names = {name for name, _ in attention.named_children()}
    qkv, gate_up = _product(attention, "q_proj", 3), _product(mlp, "gate_proj", 2)
    if names not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS) or qkv is None or gate_up is None:
        return None
    windowed = getattr(attention, "sliding_window", None) is not None
    if windowed or qkv.linear.weight.device.type != "cpu":
        return None
    head_dim = attention.head_dim
    num_heads, num_kv_heads = (size // head_dim for size in qkv.sizes[:2])
    return Parts(
        input_norm=layer.input_layernorm.forward,
        qkv=qkv.linear.forward,
        head_norms=(attention.q_norm.forward, attention.k_norm.forward)
        if names > PROJECTIONS
        else None,
        forwards=forwards,
        attention=attention,
        output=attention.o_proj.forward,
        mlp_norm=layer.post_attention_layernorm.forward,
        gate_up=gate_up.linear.forward,
        activation=mlp.act_fn.forward,
        down=mlp.down_proj.forward,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=attention.scaling,
        gate_up_sizes=gate_up.sizes,
    )


def _product(module: nn.Module, first: str, count: int) -> SharedProduct | None:
    product = getattr(getattr(module, first, None), "product", None)
    return product if isinstance(product, SharedProduct) and len(product.sizes) == count else None
