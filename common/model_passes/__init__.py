"""Passes that make a Hugging Face model faster without changing what it computes.

The engines run the model as it comes. A pass walks over its modules and gives those that it knows
another `forward`: the same function of the same parameters, in fewer or better operations. Names,
parameters and state dict stay what they are. Whatever a pass puts in place has first been compared
with the module's own answer; where they differ (another kind of norm, a rotary embedding of another
layout), the module keeps its own.

    pass      what it does                                                         where
    merge     q/k/v, and gate/up, read one input: one product instead of three     everywhere
    pack      weights laid out anew, once, for kernels that read them in order     CPU, float32
    norm      RMSNorm in four operations instead of seven; on a GPU in one         float32; CUDA
    rotary    q and k turned together in three operations; on a GPU in one         everywhere
    gate      activation(gate) * up in one kernel                                  CUDA
    layer     a decoder layer, of merged products, as one function: where `pack`   CPU
              found a compiler, in C
    last      the last layer: behind its attention only tokens whose logits are    CPU
              wanted
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .gate import fuse_gates
from .last import trim_last_layer
from .layer import join_layers
from .merge import merge_linears
from .norm import speed_up_norms
from .pack import pack_linears
from .rotary import speed_up_rotary

# In this order: what is merged is packed as one, and a layer is made of what the others left.
PASSES: dict[str, Callable[[PreTrainedModel], int]] = {
    "merge": merge_linears,
    "pack": pack_linears,
    "norm": speed_up_norms,
    "rotary": speed_up_rotary,
    "gate": fuse_gates,
    "layer": join_layers,
    "last": trim_last_layer,
}


def parse_passes(names: str) -> list[str]:
    """`"all"`, `"none"`, or names with commas between them, in the order they are applied.

    Raises `ValueError` for a name that is not in `PASSES`.
    """
    if names in ("all", "none"):
        return list(PASSES) if names == "all" else []
    wanted = {name.strip() for name in names.split(",")}
    if unknown := wanted - PASSES.keys():
        raise ValueError(
            f"model_passes must be 'all', 'none' or some of {', '.join(PASSES)}, "
            f"got {', '.join(sorted(unknown))!r}"
        )
    return [name for name in PASSES if name in wanted]


@torch.no_grad()
def apply_passes(model: PreTrainedModel, names: str = "all") -> dict[str, int]:
    """Apply passes in place, to a model that stays on its device and is not trained any more: its
    parameters take no gradients from now on.

    Returns how many modules each one changed.
    """
    chosen = parse_passes(names)
    if chosen:
        model.requires_grad_(False)
    return {name: PASSES[name](model) for name in chosen}
