"""Let an engine add something to the outputs of linear layers, during its own forwards only.

A low-rank adapter (LoRA) adds the product of two small matrices to the output of a linear layer.
The other passes have merged these layers, packed their weights, and joined whole decoder layers.
`Additions` knows where an output still exists as a tensor, and calls a function with it.

The model may belong to several engines. So nothing changes when `Additions` is made. Inside
`active()`, which holds the lock of the model, some attributes of its modules are replaced, and
afterwards they are restored. A row to which nothing is added keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from common.fast import CompiledParts, Forward, joined_layers, shared_products
from common.hf.shared import lock_of

# add(name, x, y): change y, [T, out], the output of the linear layer `name` for x, [T, in].
Add = Callable[[str, torch.Tensor, torch.Tensor], None]
MISSING = object()


@dataclass(frozen=True)
class Site:
    """A product that is computed at once: a linear layer, or several that were merged."""

    linear: nn.Linear
    names: list[str]  # the linear layers, in the order of their outputs
    sizes: list[int]  # the outputs of each

    def add(self, add: Add, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Call `add` for each layer. x: [..., in]; y: [..., out], which changes. Returns y."""
        rows = x.reshape(-1, x.shape[-1])
        parts = y.view(-1, y.shape[-1]).split(self.sizes, dim=-1)
        for name, part in zip(self.names, parts, strict=True):
            add(name, rows, part)
        return y


def sites_of(model: PreTrainedModel) -> list[Site]:
    """Return the products of a model that read a row for each token.

    The head is left out: it reads only some of the tokens. So are experts.
    """
    head = model.get_output_embeddings()
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and "expert" not in name
    }
    merged: dict[int, str] = {id(module): name for name, module in found.items()}
    sites = []
    for product in shared_products(model):
        parts = [m for m in found.values() if getattr(m, "product", None) is product]
        if parts:  # otherwise the product belongs to experts
            names = [merged.pop(id(part)) for part in parts]
            sites.append(Site(product.linear, names, product.sizes))
    for name in merged.values():
        sites.append(Site(found[name], [name], [found[name].out_features]))
    return sites


class Additions:
    """Adds to the outputs of linear layers while `active`."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site], add: Add) -> None:
        self.model = model
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []  # where, the name, the value
        for site in sites:
            self._replace(site.linear, "forward", _adding(site, add))
        by_linear = {id(site.linear): site for site in sites}
        for layer in joined_layers(model):
            if isinstance(layer.parts, CompiledParts):
                self._replace(layer, "parts", SeparateParts(layer, by_linear, add))
            if hasattr(layer, "steps"):
                self._replace(layer, "steps", LayerByLayer())

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._replaced.append((module.__dict__, name, value))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which forwards of the model add to their outputs."""
        with lock_of(self.model):
            before = [place.get(name, MISSING) for place, name, _value in self._replaced]
            try:  # inside `try`, so that an interrupt in the middle of the change is undone
                for place, name, value in self._replaced:
                    place[name] = value
                yield
            finally:
                for (place, name, _value), value in zip(self._replaced, before, strict=True):
                    if value is MISSING:
                        place.pop(name, None)
                    else:
                        place[name] = value


def _adding(site: Site, add: Add) -> Callable[[torch.Tensor], torch.Tensor]:
    own: Callable[[torch.Tensor], torch.Tensor] = site.linear.forward
    return lambda x: site.add(add, x, own(x))


class LayerByLayer:
    """Stands for `DecodeSteps`: no layer is skipped."""

    def run(self, layer: Any, plain: Callable[..., Any], x: torch.Tensor, kwargs: Any) -> Any:
        return plain(x, **kwargs)


class SeparateParts:
    """The parts of a compiled layer (see `Parts`), with additions to its four products.

    It makes more calls of C than `CompiledParts`, with the same operations in the same order.
    """

    def __init__(self, layer: Any, sites: dict[int, Site], add: Add) -> None:
        self.parts: CompiledParts = layer.parts
        self.attention, self.forwards = self.parts.attention, self.parts.forwards
        self.add = add
        linears = (
            layer.self_attn.q_proj.product.linear, layer.self_attn.o_proj,
            layer.mlp.gate_proj.product.linear, layer.mlp.down_proj,
        )  # fmt: skip
        self.qkv, self.output, self.gate_up, self.down = (sites[id(x)] for x in linears)

    def before(self, x: torch.Tensor, forward: Forward) -> Sequence[torch.Tensor]:
        """See `Parts`."""
        kernels, layer = self.parts.kernels, self.parts.layer
        heads = forward.heads(self.parts.heads)
        normed = self._norm(x, 0)
        qkv = self.qkv.add(self.add, normed, kernels.linear(normed, layer.qkv))
        kernels.turn_heads(layer, qkv, heads)
        return heads.views

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Parts`."""
        kernels, layer = self.parts.kernels, self.parts.layer
        attended = attended.flatten(2)
        x = self.output.add(self.add, attended, kernels.linear(attended, layer.output, x))
        normed = self._norm(x, 1)
        both = self.gate_up.add(self.add, normed, kernels.linear(normed, layer.gate_up))
        gated = kernels.activate_rows(both)
        return self.down.add(self.add, gated, kernels.linear(gated, layer.down, x))

    def _norm(self, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = self.parts.weights[number]
        assert weight is not None, "the layer has norms of its inputs"
        return self.parts.kernels.norm_rows(x, weight, self.parts.layer.epsilon)
