"""Layers with a recurrent state: linear attention and state space models, such as Mamba-2.

Such a layer does not call an attention function. It reads and updates its state in a cache of
Hugging Face, its argument `cache_params`. A state has parts: the last inputs of a convolution, and
the memory of the recurrence. The functions here give each request of a flat batch a cache, and the
parts of the cache are tensors of the caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from common.hf.shared import lock_of

PART_NAMES = ("conv_states", "recurrent_states")
Part = tuple[int, int, str]  # the layer, the number of the state in it, and one of `PART_NAMES`


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that take a cache for their state."""
    takers = [m for m in model.modules() if hasattr(m, "layer_idx") and _takes_state(m)]
    return [m for m in takers if not any(_takes_state(c) for c in m.modules() if c is not m)]


def _takes_state(module: nn.Module) -> bool:
    return {"hidden_states", "cache_params"} <= {
        *inspect.signature(type(module).forward).parameters
    }


@torch.inference_mode()
def unsupported_state(model: PreTrainedModel) -> str | None:
    """Return the feature of a model with states that our steps would compute wrongly, or None.

    A layer of each class computes six tokens at once, and then in parts of three, one and two.
    """
    if "past_key_values" not in inspect.signature(type(model).forward).parameters:
        return "recurrent state in a cache of its own (its forward takes no past_key_values)"
    embedding: Any = model.get_input_embeddings()
    hidden = torch.linspace(-2, 2, 6 * embedding.weight.shape[1]).sin().to(embedding.weight)
    hidden = hidden.view(1, 6, -1)
    tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 3e-2
    try:
        return _wrong_chunks(model, hidden, tolerance)
    except (MemoryError, torch.OutOfMemoryError):
        raise  # these say nothing about the model
    except Exception as error:
        return f"recurrent state of an unknown kind ({type(error).__name__})"


def _wrong_chunks(model: PreTrainedModel, hidden: torch.Tensor, tolerance: float) -> str | None:
    """Return the feature of a model with layers that do not continue a state, or None.

    hidden: the input of the layers, [1, 6, hidden]. tolerance: relative to the largest output.
    """
    with lock_of(model):  # other engines may use the layers
        parts = state_parts(model)
        cache = cache_over(model, {part: torch.zeros_like(state) for part, state in parts.items()})
        for layer in {type(layer): layer for layer in recurrent_layers(model)}.values():
            whole = layer(hidden_states=hidden)
            pieces = hidden.split([3, 1, 2], dim=1)
            got = torch.cat([layer(hidden_states=x, cache_params=cache) for x in pieces], dim=1)
            if not (got - whole).abs().max() <= tolerance * whole.abs().max():
                return "recurrent state that a later chunk of a prompt does not continue exactly"
    return None


@torch.inference_mode()
def state_parts(model: PreTrainedModel) -> dict[Part, torch.Tensor]:
    """Return the parts of the state of one request, each [1, ...], from a forward of one token."""
    if not recurrent_layers(model):
        return {}
    cache = DynamicCache(config=model.config)
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    parts: dict[Part, torch.Tensor] = {}
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in PART_NAMES:
                states: dict[int, torch.Tensor | None] = getattr(layer, name)
                parts |= {(number, i, name): s for i, s in states.items() if s is not None}
    return parts


def cache_over(model: PreTrainedModel, parts: dict[Part, torch.Tensor]) -> DynamicCache:
    """Return a cache that has these parts, and changes them in place. Zeros mean no token yet."""
    cache = DynamicCache(config=model.config)
    for (number, index, name), part in parts.items():
        layer: Any = cache.layers[number]
        getattr(layer, name)[index] = part
        getattr(layer, f"is_{name}_initialized")[index] = True
        layer.has_previous_state[index] = True
        if name == "conv_states":
            layer.conv_kernel_size[index] = part.shape[-1]
    return cache


@contextmanager
def states_switched(
    layers: Sequence[nn.Module], caches: Sequence[DynamicCache], query_lens: Sequence[int]
) -> Iterator[None]:
    """Make each layer compute the requests of a flat batch one by one, each with its own cache.

    query_lens: tokens of each request. The caller holds the lock of the model.
    """
    with ExitStack() as stack:
        for layer in layers:
            whole = layer.forward

            def by_request(
                hidden_states: torch.Tensor, *_: Any, whole: Any = whole, **__: Any
            ) -> torch.Tensor:  # [1, T, hidden]
                inputs = hidden_states.split(list(query_lens), dim=1)
                pairs = zip(inputs, caches, strict=True)
                return torch.cat([whole(hidden_states=x, cache_params=c) for x, c in pairs], dim=1)

            stack.enter_context(patch.object(layer, "forward", by_request))
        yield
