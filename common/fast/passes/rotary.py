"""Rotary position embedding in fewer operations.

Hugging Face rotates q and k separately. Each takes a slice, a negation, a concatenation, two
products and a sum. Here the sign is moved into the sine, once in a forward instead of twice in each
layer:

    x * cos + [-x2, x1] * [sin, sin]  =  x * cos + roll(x) * [-sin, sin]

If q and k are adjacent in memory, as merged layers leave them, both are rotated together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..identity_cache import IdentityCache
from .replace import probe, same

NAME = "apply_rotary_pos_emb"  # the name of the function in modeling files
Pair = tuple[torch.Tensor, torch.Tensor]


def signed(sin: torch.Tensor) -> torch.Tensor:
    """Return [-sin, sin], for `turn`. sin: [..., head_dim]; returns the same shape."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


class Rotary:
    """Replaces `original`, the function `apply_rotary_pos_emb` of a modeling file."""

    def __init__(self, original: Callable[..., Pair]) -> None:
        self.original = original
        self.signed_sine = IdentityCache(signed)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any
    ) -> Pair:
        """Rotate q and k, [B, heads, T, head_dim]. cos, sin: [B, T, head_dim]."""
        if more or cos.shape[-1] != q.shape[-1]:  # only a part of each head is rotated
            return self.original(q, k, cos, sin, *more)
        if q.is_cuda:
            from .triton_kernels import rotate

            return rotate(q, k, cos, sin)
        cos, sin = cos.unsqueeze(1), self.signed_sine(sin).unsqueeze(1)
        both = _in_one(q, k)
        if both is None:
            return turn(q, cos, sin), turn(k, cos, sin)
        turned = turn(both, cos, sin)
        return turned[:, : q.shape[1]], turned[:, q.shape[1] :]


def turn(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Return x, [..., head_dim], rotated by the angles of `cos` and of a sine from `signed`.

    In low precision, both products are rounded before they are added, as in Hugging Face's code.
    Different rounding could send a token to another expert of a mixture of experts.
    """
    turned = x.roll(x.shape[-1] // 2, dims=-1).mul_(signed_sin)
    return turned.addcmul_(x, cos) if x.dtype == torch.float32 else turned.add_(x * cos)


def _in_one(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return one view of q and k, [B, q heads + k heads, T, head_dim].

    Returns None if the heads of k do not directly follow the heads of q in memory.
    """
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None
    if k.storage_offset() != q.storage_offset() + q.shape[1] * q.stride(1):
        return None
    # The stride of a dimension of size 1 has no meaning.
    if any(q.stride(i) != k.stride(i) for i in range(4) if i == 1 or q.shape[i] > 1):
        return None
    heads = q.shape[1] + k.shape[1]
    return q.as_strided((q.shape[0], heads, *q.shape[2:]), q.stride())


def speed_up_rotary(model: nn.Module) -> int:
    """Give attention layers a `forward` that calls `Rotary`; return their number.

    The new `forward` has the code of the old one, but one name in it refers to another function.
    The modeling file does not change, because other models share it.
    """
    like = next(model.parameters())
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for original in {type(module) for module in model.modules()}:
        if (faster := _with_rotary(original, like)) is not None:
            classes[original] = faster
    layers = [module for module in model.modules() if type(module) in classes]
    for layer in layers:
        layer.__class__ = classes[type(layer)]
    return len(layers)


def _with_rotary(layer: type[nn.Module], like: torch.Tensor) -> type[nn.Module] | None:
    """Return a subclass with a `forward` that calls `Rotary`; None if the result would differ."""
    forward = layer.forward
    if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
        return None
    rotary = Rotary(forward.__globals__[NAME])
    if not _is_same(rotary, like):
        return None
    rebound = FunctionType(
        forward.__code__,
        {**forward.__globals__, NAME: rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    rebound.__kwdefaults__ = forward.__kwdefaults__
    return type(layer.__name__, (layer,), {"forward": rebound})


def _is_same(rotary: Rotary, like: torch.Tensor) -> bool:
    """Return whether the function of a modeling file rotates halves, with the usual arguments."""
    if list(inspect.signature(rotary.original).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    heads = probe(2, 3, 6, 8, like=like).transpose(1, 2)  # [B, heads, T, head_dim]
    angles = probe(2, 3, 4, like=like)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
    merged, apart = (heads[:, :4], heads[:, 4:]), (heads[:, 2:], heads[:, :2])
    try:
        return all(
            same(ours, theirs)
            for q, k in (merged, apart)
            for ours, theirs in zip(
                rotary(q, k, cos, sin), rotary.original(q, k, cos, sin), strict=True
            )
        )
    except Exception:  # a function of another kind: gpt_oss passes half of each cosine
        return False
