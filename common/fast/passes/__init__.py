"""Passes that make a Hugging Face model faster without changing what it computes.

The engines run the Hugging Face model. A pass goes through its modules and replaces the `forward`
of the modules that it knows. The new `forward` computes the same function of the same parameters
with fewer or faster operations. Names, parameters and state dict do not change. Before a pass keeps
a new `forward`, it compares it with the module's own result. If they differ (another kind of norm,
a rotary embedding with another layout), the module keeps its own `forward`.

    pass      what it does                                                         where
    merge     q, k, v (and gate, up) read one input: one product for all           everywhere
    pack      keep float32 weights also in the order in which kernels read them;   CPU, float32
              let the kernels read stored weights
    norm      RMSNorm in four operations instead of seven; on a GPU in one         float32; CUDA
    rotary    rotate q and k together in three operations; on a GPU in one         everywhere
    gate      activation(gate) * up in one kernel                                  CUDA
    layer     a decoder layer with merged products as one function; in C if        everywhere
              `pack` found a compiler, also its attention to a Hugging Face
              cache; on a GPU with fused kernels
    last      after the attention of the last layer, compute only the tokens       CPU
              that need logits
    decode    all layers of a decode step as one call of C                         CPU
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from .decode import join_decodes
from .gate import fuse_gates
from .last import trim_last_layer
from .layer import join_layers
from .merge import merge_linears
from .norm import speed_up_norms
from .pack import pack_linears
from .rotary import speed_up_rotary

# The order matters: merged weights are packed as one, and `layer` uses the results of the others.
PASSES: dict[str, Callable[[PreTrainedModel], int]] = {
    "merge": merge_linears,
    "pack": pack_linears,
    "norm": speed_up_norms,
    "rotary": speed_up_rotary,
    "gate": fuse_gates,
    "layer": join_layers,
    "last": trim_last_layer,
    "decode": join_decodes,
}

logger = logging.getLogger(__name__)
ON_WEIGHTS = ("merge", "pack")  # these do not depend on what a layer computes


def parse_passes(names: str) -> list[str]:
    """Convert `"all"`, `"none"`, or names separated by commas to names in the order of `PASSES`.

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
def apply_passes(
    model: PreTrainedModel, names: str = "all", connect: Callable[[], None] = lambda: None
) -> dict[str, int]:
    """Apply passes to a model in place. Return the number of modules that each pass changed.

    connect: lets the ranks of tensor parallelism add their results. It is called after the weights
    are packed, and before a pass reads the results of layers.

    The model must stay on its device. It cannot be trained any more: its parameters no longer
    require gradients.
    """
    chosen = parse_passes(names)
    if chosen:
        model.requires_grad_(False)
        _warn_without_kernels(model.device, model.dtype)
    on_weights = [name for name in chosen if name in ON_WEIGHTS]
    changed = {name: PASSES[name](model) for name in on_weights}
    connect()
    return changed | {name: PASSES[name](model) for name in chosen if name not in ON_WEIGHTS}


def _warn_without_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Log why a GPU cannot run the fused kernels. The passes then leave the modules as they are."""
    if device.type != "cuda":
        return
    try:
        from . import triton_kernels

        x = torch.ones(1, 16, device=device, dtype=dtype)
        triton_kernels.silu_mul(x, x)
    except Exception as error:
        logger.warning(
            "the fused kernels fail on %s, so the modules of Hugging Face run in their place: %s",
            device, error,
        )  # fmt: skip


def has_passes(model: nn.Module) -> bool:
    """Return whether a pass has changed a module: its class then comes from a file of this package.

    The pass `pack` may also leave stored weights: see `with_stored`.
    """
    kinds = {type(module) for module in model.modules()}
    return any(
        base.__module__.startswith(f"{__name__}.") for kind in kinds for base in kind.__mro__
    )
