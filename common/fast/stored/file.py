"""A file of stored weights, which is mapped into memory.

It is a safetensors file: weights in panels as tables of bytes, all other tensors as float32. The
system reads a part of the file when it is first used, and processes that use the same file share
the memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .formats import FORMATS
from .modules import can_keep, keep, share, stored_of
from .weight import StoredWeight

FILE = "stored.safetensors"
AnyWeight: TypeAlias = StoredWeight | torch.Tensor


def save_weights(weights: Mapping[str, AnyWeight], folder: Path) -> None:
    """Write weights by their names in the model."""
    tensors, kept = {}, {}
    for name, weight in weights.items():
        if isinstance(weight, StoredWeight):
            kept[name] = {"format": weight.format.name, "shape": [weight.out, weight.inputs]}
            weight = weight.data
        tensors[name] = weight.contiguous()
    save_file(tensors, folder / FILE, metadata={"stored": json.dumps(kept)})


def load_weights(folder: Path) -> dict[str, AnyWeight]:
    """Return the weights of a file. Their data is read when it is first used."""
    with safe_open(folder / FILE, framework="pt") as file:
        kept = json.loads(file.metadata()["stored"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stored = {}
    for name, facts in kept.items():
        out, inputs = facts["shape"]
        stored[name] = StoredWeight(FORMATS[facts["format"]], out, inputs, tensors[name])
    return tensors | stored


def put_weights(model: Any, weights: Mapping[str, AnyWeight]) -> dict[str, Any]:
    """Give weights to a model without weights (of the meta device).

    Returns what did not fit, in the words of transformers' `from_pretrained`: keys that are
    missing, unexpected or mismatched.
    """
    wanted = model.state_dict()
    mismatched = []
    for name, weight in weights.items():
        if name not in wanted:
            continue
        shape = _shape(weight)
        if shape != wanted[name].shape:
            mismatched.append((name, shape, wanted[name].shape))
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(weight, StoredWeight):
            keep(module, weight)
        elif leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
        else:
            module._buffers[leaf] = weight
    model.tie_weights()
    share_tied(model)
    wrong = {name for name, *_ in mismatched}
    return {
        "missing_keys": [n for n, x in model.state_dict().items() if x.is_meta and n not in wrong],
        "unexpected_keys": [name for name in weights if name not in wanted],
        "mismatched_keys": mismatched,
    }


def share_tied(model: nn.Module) -> None:
    """Give a stored weight also to the modules that are tied to its module."""
    modules = [module for module in model.modules() if can_keep(module)]
    kept = {id(module.weight): module for module in modules if stored_of(module)}
    for module in modules:
        if not stored_of(module) and (other := kept.get(id(module.weight))) is not None:
            share(module, other)


def _shape(weight: AnyWeight) -> torch.Size:
    if isinstance(weight, StoredWeight):
        return torch.Size((weight.out, weight.inputs))
    return weight.shape
