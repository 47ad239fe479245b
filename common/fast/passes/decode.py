"""All layers of a decode step as one call of C.

A step for a few requests computes little in each layer, and Python between the calls of C took a
third of its time. So the first decode step on a KV pool is watched: which memory does the attention
of each layer use, and does it do nothing but store keys and values and attend to them? Then the
same step is computed again by one call of `decode_layers` (`cpu_kernels/layer.c`). If the results
have the same bits, the first layer of each later decode step makes this call. The loop of the model
over its layers then ends after the first one. If a model has another kind of loop, the other layers
return what the first one computed.

This is like the replay of a CUDA graph: the Python code of the attention function does not run in
these steps. To run it in each step, use `EngineConfig(readable=True)`. If any layer
has a hook, or a `forward` of its own, each layer is computed by itself. Hooks of modules inside a
layer do not run (see `layer`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import cpu_attention
from ..cpu_kernels import Layers
from .forwards import Forward
from .layer import joined_layers
from .layer_parts import CompiledParts
from .replace import subclass


def join_decodes(model: PreTrainedModel) -> int:
    """Let decode steps compute all layers in one call. Return the number of layers."""
    layers = joined_layers(model)
    usual = all(isinstance(layer.parts, CompiledParts) for layer in layers)
    if not layers or not usual or len({layer.parts.heads for layer in layers}) != 1:
        return 0
    if not isinstance(layers[0], _SkippedLayer):
        steps, mixin = DecodeSteps(layers), cast("Any", _SkippedLayer)
        for layer in layers:
            layer.__dict__["steps"] = steps
            original: Any = type(layer)
            layer.__class__ = subclass(mixin, original)
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and [*module] == layers:
                list_type: Any = type(module)
                module.__dict__["steps"] = steps
                module.__class__ = subclass(cast("Any", _LayerList), list_type)
    return len(layers)


class _LayerList(nn.ModuleList):
    """A mixin for the list of the layers.

    A forward iterates over a slice of it. `nn.ModuleList` would make a new module for each slice.
    """

    steps: DecodeSteps

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Loop(self.steps, [*self._modules.values()][index])
        return super().__getitem__(index)


class _Loop(list[Any]):
    """Layers to iterate over. The iteration ends where the first layer has computed all of them."""

    def __init__(self, steps: DecodeSteps, layers: list[Any]) -> None:
        super().__init__(layers)
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        self.steps.done = None
        for layer in super().__iter__():
            yield layer
            if self.steps.done is not None:
                self.steps.done = None
                return


class _SkippedLayer(nn.Module):
    """A mixin for a joined layer (`layer.py`): `DecodeSteps` may compute its decode steps."""

    steps: DecodeSteps

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer, or return what the first layer computed for all of them."""
        if args or not _is_decode(hidden_states, kwargs):
            return super().forward(hidden_states, *args, **kwargs)
        return self.steps.run(self, super().forward, hidden_states, kwargs)


class DecodeSteps:
    """The decode steps of a model. The lock of the model admits one forward at a time."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.recorded: WeakKeyDictionary[Any, Recorded | None] = WeakKeyDictionary()  # by KV pool
        self.done: torch.Tensor | None = None  # the result of all layers of this forward
        self.watched: list[Watched] = []
        self.input: torch.Tensor | None = None

    def run(
        self, layer: Any, plain: Callable[..., torch.Tensor], x: torch.Tensor, kwargs: Any
    ) -> torch.Tensor:
        """Compute a layer of a decode step. plain: the `forward` of this layer alone."""
        first, last = layer is self.layers[0], layer is self.layers[-1]
        if x is self.done and not first:
            self.done = None if last else x
            return x
        paged = kwargs["paged"]
        if first:
            self.done, self.watched, self.input = None, [], x
        if paged.pool in self.recorded:
            recorded = self.recorded[paged.pool]
            if first and recorded is not None and recorded.covers(kwargs, x, self.layers):
                self.done = recorded.replay(self.layers[0], kwargs, x)
                return self.done
            return plain(x, **kwargs)
        self.watched.append(Watched(paged.ops))
        watched = dataclasses.replace(paged, ops=self.watched[-1])
        x = plain(x, **{**kwargs, "paged": watched})
        if last:
            self.recorded[paged.pool] = self._recorded(kwargs, x)
            self.watched, self.input = [], None  # they hold the memory of the engine
        return x

    def _recorded(self, kwargs: Any, output: torch.Tensor) -> Recorded | None:
        """Return how to repeat the watched step; None if one call cannot, or gives other bits."""
        x = self.input
        scales = {watched.scale for watched in self.watched}
        if x is None or len(scales) != 1 or len(self.watched) != len(self.layers):
            return None
        if not all(watched.is_usual for watched in self.watched):
            return None
        forward = _forward_of(self.layers[0], kwargs, x)
        layers = [layer.parts.layer for layer in self.layers]
        try:
            joined = Layers(layers, [watched.memory for watched in self.watched])
        except ValueError:
            return None
        recorded = Recorded(joined, scales.pop(), forward.attend, kwargs["paged"].ops, set(kwargs))
        if torch.equal(recorded.replay(self.layers[0], kwargs, x), output):
            return recorded
        for watched in self.watched:
            watched.store_again()
        return None


class Watched:
    """Kernels for attention that note the calls of one layer and pass them on."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: list[str] = []
        self.memory: tuple[torch.Tensor, torch.Tensor]
        self.stored: tuple[Any, ...] = ()
        self.scale = 0.0

    @property
    def is_usual(self) -> bool:
        """Whether the attention of the layer stored its keys and values, and attended to them."""
        return self.calls == ["store_kv", "paged_decode"]

    def store_again(self) -> None:
        """Store the keys and values of the step again."""
        self.ops.store_kv(*self.stored)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name == "store_kv":
                keys, values, key, value, meta = args
                self.memory = keys, values
                self.stored = keys, values, key.clone(), value.clone(), meta
            elif name == "paged_decode":
                self.scale = float(args[4])
            return getattr(self.ops, name)(*args)

        return call


@dataclasses.dataclass(frozen=True)
class Recorded:
    """How the layers of a model attend to a KV pool."""

    layers: Layers
    scale: float
    attend: Callable[..., Any]  # the attention function
    ops: Any
    names: set[str]  # of the arguments of a layer

    def covers(self, kwargs: Any, x: torch.Tensor, layers: list[Any]) -> bool:
        """Return whether a forward has the same kernels, arguments and attention, and no hooks."""
        return (
            kwargs["paged"].ops is self.ops
            and kwargs.keys() == self.names
            and self.layers.is_alive
            and _forward_of(layers[0], kwargs, x).attend is self.attend
            and not any(map(_must_run, layers))
        )

    def replay(self, first: Any, kwargs: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        heads = _forward_of(first, kwargs, x).heads(first.parts.heads)
        requests = cpu_attention.layout_of(kwargs["paged"].metadata)
        return first.parts.kernels.decode_layers(self.layers, x, heads, requests, self.scale)


def _is_decode(x: torch.Tensor, kwargs: Any) -> bool:
    """Return whether a forward is for one token of each request, with the kernels in C."""
    paged = kwargs.get("paged")
    if paged is None or paged.ops is not cpu_attention or kwargs.get("past_key_values") is not None:
        return False
    angles, meta = kwargs.get("position_embeddings"), paged.metadata
    return angles is not None and x.shape[1] == meta.num_decodes == len(meta.seq_lens)


def _must_run(layer: Any) -> bool:
    """Return whether a layer has hooks or a `forward` of its own."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _forward_of(layer: Any, kwargs: Any, x: torch.Tensor) -> Forward:
    forward: Forward = layer.parts.forwards(kwargs["position_embeddings"], x.shape[:2])
    return forward
