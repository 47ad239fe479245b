"""The parts of a decoder layer before and after its attention: in torch, in C, or in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import Linear

from ...parallel.ranks import Divided
from ..cpu_kernels import Layer
from .forwards import Forward, Forwards
from .merge import SharedProduct
from .pack import CompiledProduct
from .rotary import turn


class Parts(Protocol):
    """A decoder layer without its attention."""

    attention: Any  # the attention module: the attention function needs it as an argument
    forwards: Forwards

    def before(self, x: torch.Tensor, forward: Forward) -> Sequence[torch.Tensor]:
        """Compute the part before attention. x: [B, T, hidden].

        Returns q, k, v: [B, heads, T, head_dim], with q and k rotated. They are valid until the
        next layer of the forward overwrites them.
        """

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Compute the part after attention.

        attended: [B, T, heads, head_dim], the output of attention; x: [B, T, hidden], the input of
        the layer. Returns the output of the layer, in the shape of x.
        """


class TorchParts:
    """A few operations of torch, and the modules of the layer as other passes left them."""

    def __init__(self, layer: Any, forwards: Forwards) -> None:
        self.attention, self.forwards = layer.self_attn, forwards
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.gate_up = products_of(layer)
        self.output, self.down = self.attention.o_proj, layer.mlp.down_proj
        self.activation = layer.mlp.act_fn
        self.head_norms: list[Any]
        self.head_norms = [getattr(self.attention, name, None) for name in ("q_norm", "k_norm")]
        self.heads = [size // self.attention.head_dim for size in self.qkv.sizes]

    def before(self, x: torch.Tensor, forward: Forward) -> Sequence[torch.Tensor]:
        """See `Parts`."""
        qkv = self.qkv.linear.forward(self.input_norm.forward(x))
        heads = qkv.view(*x.shape[:2], -1, self.attention.head_dim)
        if self.head_norms[0] is None:  # q and k are adjacent in memory: rotate them together
            both, v = heads.split([sum(self.heads[:2]), self.heads[2]], dim=2)
            turned = turn(both, forward.cos, forward.signed_sin)
            q, k = turned.split(self.heads[:2], dim=2)
            return [heads.transpose(1, 2) for heads in (q, k, v)]
        *qk, v = heads.split(self.heads, dim=2)
        q, k = (
            turn(norm.forward(x), forward.cos, forward.signed_sin)
            for norm, x in zip(self.head_norms, qk, strict=True)
        )
        return [heads.transpose(1, 2) for heads in (q, k, v)]

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Parts`."""
        x = self.output.forward(attended.flatten(2)).add_(x)
        both = self.gate_up.linear.forward(self.mlp_norm.forward(x))
        gate, up = both.split(self.gate_up.sizes, dim=-1)
        return self.down.forward(self.activation.forward(gate).mul_(up)).add_(x)


class TritonParts(TorchParts):
    """The same on CUDA, with fewer kernels between the products: one before attention, two after.

    One normalizes and rotates q and k. One adds the input to the output of attention, and
    normalizes the sum.
    """

    def __init__(self, layer: Any, forwards: Forwards) -> None:
        """Raises `AttributeError` or `TypeError` for a layer with other parts."""
        super().__init__(layer, forwards)
        if "SiLU" not in type(self.activation).__name__:
            raise TypeError("its activation is not SiLU")
        found = [norm for norm in self.head_norms if norm is not None]
        self.head_weights = (found[0].weight, found[1].weight) if found else None
        epsilons = {norm.variance_epsilon for norm in found} or {0.0}
        if len(epsilons) > 1:
            raise TypeError("the norms of its heads differ")
        (self.head_epsilon,) = epsilons

    def before(self, x: torch.Tensor, forward: Forward) -> Sequence[torch.Tensor]:
        """See `Parts`."""
        from .triton_kernels import norm_and_rotate

        dim = self.attention.head_dim
        qkv = self.qkv.linear.forward(self.input_norm.forward(x))
        norm_and_rotate(
            qkv, (self.heads[0], self.heads[1]), dim, forward.cos, forward.signed_sin,
            self.head_weights, self.head_epsilon,
        )  # fmt: skip
        heads = qkv.view(*x.shape[:2], -1, dim).split(self.heads, dim=2)
        return [part.transpose(1, 2) for part in heads]

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Parts`."""
        from .triton_kernels import add_rms_norm, silu_mul

        output, norm = self.output.forward(attended.flatten(2)), self.mlp_norm
        x, normed = add_rms_norm(output, x, norm.weight, norm.variance_epsilon)
        both = self.gate_up.linear.forward(normed)
        gate, up = both.split(self.gate_up.sizes, dim=-1)
        down, activated = self.down, silu_mul(gate, up)
        if getattr(down.forward, "__func__", None) is Linear.forward and down.bias is None:
            # The product is added to x by its own kernel: no launch more, and rounded once.
            return x.flatten(0, 1).addmm_(activated.flatten(0, 1), down.weight.t()).view_as(x)
        return down.forward(activated).add_(x)


class CompiledParts:
    """Two calls of C, for a layer with compiled products, RMSNorms and SiLU activation."""

    def __init__(self, layer: Any, forwards: Forwards) -> None:
        """Raises `AttributeError` or `TypeError` for any other layer."""
        attention = layer.self_attn
        self.attention, self.forwards = attention, forwards
        qkv, gate_up = products_of(layer)
        linears = qkv.linear, attention.o_proj, gate_up.linear, layer.mlp.down_proj
        self.products = [linear.packed for linear in linears]
        if any(isinstance(linear, Divided) for linear in linears):
            raise TypeError("the ranks must add their results in the middle of the layer")
        if not all(isinstance(product, CompiledProduct) for product in self.products):
            raise TypeError("its products belong to another library")
        if self.products[2].linear.count != 2:
            raise TypeError("gate and up are not two weights")
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.weights = [None if norm is None else norm.weight.detach() for norm in norms]
        if not _fits(layer, self.weights):
            raise TypeError("its parts are not of the usual shapes")
        epsilons = {norm.variance_epsilon for norm in norms if norm is not None}
        if len(epsilons) > 1:
            raise TypeError("its norms differ")
        dim = attention.head_dim
        self.heads = tuple(size // dim for size in qkv.sizes)
        self.kernels = self.products[0].kernels
        self.layer = Layer(
            *(None if weight is None else weight.data_ptr() for weight in self.weights),
            *epsilons, *self.heads[:2], dim,
            *(product.linear for product in self.products),
        )  # fmt: skip

    def before(self, x: torch.Tensor, forward: Forward) -> Sequence[torch.Tensor]:
        """See `Parts`."""
        heads = forward.heads(self.heads)
        self.kernels.before_attention(self.layer, x, heads)
        return heads.views

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Parts`."""
        return self.kernels.after_attention(self.layer, attended, x)


def _fits(layer: Any, norms: list[torch.Tensor | None]) -> bool:
    """Return whether all shapes are as `layer.c` assumes.

    norms: the weights of the norms of the layer's input, the MLP's input, the heads of q, and the
    heads of k.
    """
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


def products_of(layer: Any) -> tuple[Any, Any]:
    """Return the `SharedProduct`s of q, k, v and of gate, up; None for one that is not merged."""
    found = []
    for module, first, count in ((layer.self_attn, "q_proj", 3), (layer.mlp, "gate_proj", 2)):
        product = getattr(getattr(module, first, None), "product", None)
        merged = isinstance(product, SharedProduct) and len(product.sizes) == count
        found.append(product if merged else None)
    return found[0], found[1]
