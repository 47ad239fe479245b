"""A decoder layer as one function.

Between its products a layer does little, but what it does is spread over eleven modules and some
fifty operations, and a call costs the same for one token as for a thousand. At one token a step the
calls took half as long as the products. Here a layer of the usual kind (Llama's) is three calls:

    x -> norm -> qkv -> turn q and k | attention | -> o, + x -> norm -> gate, up -> down, + x

What is before attention and what is after it are compiled (`cpu_kernels/layer.c`) where the
products are, and else a few operations of torch. Hooks on the layer itself still run; on modules
inside of it they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ..cpu_kernels import Layer
from .merge import SharedProduct
from .pack import CompiledProduct
from .replace import probe, same, subclass
from .rotary import signed, turn

CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # Qwen3 has them
KNOWN_NAMES = {  # what the code of attention uses, in the models that a joined layer stands for
    name
    for attention in (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
    for name in attention.forward.__code__.co_names
}


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


class Parts(Protocol):
    """A layer but for its attention."""

    attention: Any  # the module: an attention function is told which it is for
    forwards: Forwards

    def before(self, x: torch.Tensor, forward: Forward) -> list[torch.Tensor]:
        """x: [B, T, hidden]. Returns q, k, v: [B, T, heads, head_dim], q and k turned."""

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """attended: [B, T, heads, head_dim]; x, what the layer was given: [B, T, hidden].
        Returns the layer's answer, of x's shape."""


class TorchParts:
    """A few operations of torch, and what other passes made of the layer's modules."""

    def __init__(self, layer: Any, forwards: Forwards) -> None:
        self.attention, self.forwards = layer.self_attn, forwards
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.gate_up = products_of(layer)
        self.output, self.down = self.attention.o_proj, layer.mlp.down_proj
        self.activation = layer.mlp.act_fn
        self.head_norms: list[Any]
        self.head_norms = [getattr(self.attention, name, None) for name in ("q_norm", "k_norm")]
        self.heads = [size // self.attention.head_dim for size in self.qkv.sizes]

    def before(self, x: torch.Tensor, forward: Forward) -> list[torch.Tensor]:
        """As `Parts` says."""
        qkv = self.qkv.linear.forward(self.input_norm.forward(x))
        heads = qkv.view(*x.shape[:2], -1, self.attention.head_dim)
        if self.head_norms[0] is None:  # q and k lie side by side, and are turned at once
            both, v = heads.split([sum(self.heads[:2]), self.heads[2]], dim=2)
            turned = turn(both, forward.cos, forward.signed_sin)
            return [*turned.split(self.heads[:2], dim=2), v]
        *qk, v = heads.split(self.heads, dim=2)
        q, k = (
            turn(norm.forward(x), forward.cos, forward.signed_sin)
            for norm, x in zip(self.head_norms, qk, strict=True)
        )
        return [q, k, v]

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As `Parts` says."""
        x = self.output.forward(attended.flatten(2)).add_(x)
        both = self.gate_up.linear.forward(self.mlp_norm.forward(x))
        gate, up = both.split(self.gate_up.sizes, dim=-1)
        return self.down.forward(self.activation.forward(gate).mul_(up)).add_(x)


class CompiledParts:
    """Two calls of C, for layers whose products are compiled, whose norms are RMSNorms and whose
    activation is SiLU."""

    def __init__(self, layer: Any, forwards: Forwards) -> None:
        """Raises `AttributeError` or `TypeError` for another layer."""
        attention = layer.self_attn
        self.attention, self.forwards = attention, forwards
        qkv, gate_up = products_of(layer)
        linears = qkv.linear, attention.o_proj, gate_up.linear, layer.mlp.down_proj
        self.products = [linear.packed for linear in linears]
        if not all(isinstance(product, CompiledProduct) for product in self.products):
            raise TypeError("its products are another library's")
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.weights = [None if norm is None else norm.weight.detach() for norm in norms]
        if not _fits(layer, self.weights):
            raise TypeError("its parts are not of the usual shapes")
        epsilons = {norm.variance_epsilon for norm in norms if norm is not None}
        if len(epsilons) > 1:
            raise TypeError("its norms differ")
        dim = attention.head_dim
        self.heads = [size // dim for size in qkv.sizes]
        self.kernels = self.products[0].kernels
        self.layer = Layer(
            *(None if weight is None else weight.data_ptr() for weight in self.weights),
            *epsilons, *self.heads[:2], dim,
            *(product.linear for product in self.products),
        )  # fmt: skip

    def before(self, x: torch.Tensor, forward: Forward) -> list[torch.Tensor]:
        """As `Parts` says."""
        heads = self.kernels.before_attention(self.layer, x, forward.cos, forward.signed_sin)
        return list(heads.split(self.heads, dim=2))

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As `Parts` says."""
        return self.kernels.after_attention(self.layer, attended, x)


def _fits(layer: Any, norms: list[torch.Tensor | None]) -> bool:
    """Whether all shapes are as `layer.c` takes for granted. norms: of the input, of what attention
    gave, of q's and of k's heads."""
    attention, mlp, (qkv, gate_up) = layer.self_attn, layer.mlp, products_of(layer)
    hidden, width, dim = qkv.linear.in_features, mlp.down_proj.in_features, attention.head_dim
    q, k, v = qkv.sizes
    sizes = (hidden, hidden, dim, dim)
    return (
        k == v
        and q % k == q % dim == k % dim == 0
        and attention.o_proj.weight.shape == (hidden, q)
        and gate_up.linear.weight.shape == (2 * width, hidden)
        and gate_up.sizes == [width, width]
        and mlp.down_proj.weight.shape == (hidden, width)
        and all(
            norm is None or (norm.shape == (size,) and norm.dtype == torch.float32)
            for norm, size in zip(norms, sizes, strict=True)
        )
    )


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
        attention = parts.attention
        if position_embeddings is None or position_embeddings[0].shape[-1] != attention.head_dim:
            return super().forward(  # no rotary embedding, or of a part of each head
                hidden_states, attention_mask=attention_mask, position_ids=position_ids,
                past_key_values=past_key_values, use_cache=use_cache,
                position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
        forward = parts.forwards(position_embeddings, x.shape[:2])
        q, k, v = (heads.transpose(1, 2) for heads in parts.before(x, forward))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, attention.layer_idx)
        attended, _ = forward.attend(
            attention, q, k, v, attention_mask, dropout=0.0, scaling=attention.scaling,
            position_ids=position_ids, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        return parts.after(attended, x)


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
    if not _is_usual(layer):
        return False
    original: Any = type(layer)
    qkv, _ = products_of(layer)
    # Small numbers: the residual must not hide what the rest of the layer makes of them.
    x = 0.05 * probe(2, 5, qkv.linear.in_features, like=qkv.linear.weight)
    angle = probe(2, 5, layer.self_attn.head_dim // 2, like=x).repeat(1, 1, 2)
    given = {"position_embeddings": (angle.cos(), angle.sin())}
    for kind in (CompiledParts, TorchParts):
        try:  # a layer may want to be called, or to be made, in another way than Llama's
            theirs = layer(x, **given)
            layer.__dict__["parts"] = kind(layer, forwards)
            layer.__class__ = subclass(_DecoderLayer, original)
            largest = theirs.abs().max()
            if same(layer(x, **given) / largest, theirs / largest):
                return True
        except Exception:
            pass
        layer.__class__ = original
        layer.__dict__.pop("parts", None)
    return False


def _is_usual(layer: Any) -> bool:
    """Whether a layer looks as Llama's do, is on CPU, and has its products merged."""
    names = {name for name, _ in layer.self_attn.named_children()}
    if names not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS):
        return False
    # What a short trial would not show, say a clip of large numbers, has a name in the code.
    if not set(type(layer.self_attn).forward.__code__.co_names) <= KNOWN_NAMES:
        return False
    windowed = getattr(layer.self_attn, "sliding_window", None) is not None
    merged = products_of(layer)
    return not windowed and all(p and p.linear.weight.device.type == "cpu" for p in merged)


def products_of(layer: Any) -> tuple[Any, Any]:
    """The `SharedProduct`s of q, k, v and of gate, up; None for one that is not merged."""
    found = []
    for module, first, count in ((layer.self_attn, "q_proj", 3), (layer.mlp, "gate_proj", 2)):
        product = getattr(getattr(module, first, None), "product", None)
        merged = isinstance(product, SharedProduct) and len(product.sizes) == count
        found.append(product if merged else None)
    return found[0], found[1]
