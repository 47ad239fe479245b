"""Random LoRA adapters in PEFT's format, for tests and demos that must not need PEFT."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...chain import load

PREFIX = "base_model.model."


def shapes_of(model: Any) -> dict[str, tuple[int, int]]:
    """Return (in, out) of each linear layer that may have an adapter."""
    return {
        name: (site.linear.in_features, size)
        for site in load("lora", "additions").sites_of(model)
        for name, size in zip(site.names, site.sizes, strict=True)
    }


def merged_model(model: Any, folder: str) -> Any:
    """Return a copy with the weights W + scale * B A, as PEFT's `merge_and_unload` does."""
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    model = copy.deepcopy(model)
    for key in [key for key in tensors if ".lora_A." in key]:
        name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        alpha = config.get("alpha_pattern", {}).get(name, config["lora_alpha"])
        scale = alpha / len(a) ** (0.5 if config.get("use_rslora") else 1)
        model.get_submodule(name).weight.data += scale * (b @ a)
    return model


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    seed: int,
    *,
    size: float = 0.3,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> str:
    """Write an adapter with normal random matrices. Return its folder, as a `LoRARequest` needs it.

    shapes: (in, out) of each linear layer that gets matrices. size: their standard deviation.
    ranks: of single layers, where they differ. config: values of `adapter_config.json`.
    """
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    config = {"target_modules": sorted({name.split(".")[-1] for name in shapes}), **config}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (width, out) in shapes.items():
        rank = (ranks or {}).get(name, config["r"])
        for letter, shape in (("A", (rank, width)), ("B", (out, rank))):
            matrix = size * torch.randn(shape, generator=generator)
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = matrix
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    Path(folder, "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)
