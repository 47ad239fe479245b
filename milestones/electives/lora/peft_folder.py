"""Read a LoRA adapter from a folder in PEFT's format, or refuse it.

The file has two matrices for each adapted linear layer, A [r, in] and B [out, r]. The layer's
output grows by `scale * B A x`, with the scale alpha / r, or alpha / sqrt(r) for rank-stabilized
LoRA (Kalajdzievski, 2023). The scale becomes a part of B, in float32. LoRA is from Hu et al.
(2021).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from common.validation import shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings that change what an adapter computes, with the values that leave it as it is.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    # Other ways to initialize an adapter, such as PiSSA, also change the weights of the model.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
} | dict.fromkeys(
    (
        "use_dora", "lora_bias", "modules_to_save", "use_qalora", "use_bdlora", "layer_replication",
        "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
        "kasa_config", "monteclora_config",
    ),
    (None, False, [], {}),
)  # fmt: skip
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of the files
LARGEST_ALPHA = 2**31
KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class LowRank(NamedTuple):
    """What an adapter adds to a linear layer: x A^T B for each row x. On the host."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [r, out], with the scale

    @property
    def rank(self) -> int:
        return len(self.a)


def read_adapter(
    folder: str, shapes: Mapping[str, tuple[int, int]], max_rank: int
) -> dict[str, LowRank]:
    """Return the matrices of an adapter, in float32, by the name of their linear layer.

    shapes: (in, out) of each linear layer that may have an adapter. Raises `ValueError`, which
    names the file and the field, for an adapter that would not be computed as PEFT computes it.
    """
    config = _read_config(Path(folder, CONFIG))
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _read_weights(Path(folder, WEIGHTS)).items():
        match = KEY.fullmatch(key)
        if match is None or match[1] not in shapes:
            raise ValueError(f"{WEIGHTS}: {shown(key)} belongs to no linear layer of this model")
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise ValueError(f"{WEIGHTS} has no matrices")
    return {
        name: _low_rank(name, parts, shapes[name], config, max_rank)
        for name, parts in found.items()
    }


def _read_config(path: Path) -> dict[str, Any]:
    """Return the configuration. Raises `ValueError` for settings that are not supported."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"lora_path: cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} must be an object, got {shown(config)}")
    for name, neutral in NEUTRAL.items():
        if (value := config.get(name, neutral[0])) not in neutral:
            raise ValueError(f"{CONFIG}: {name}={shown(value)} is not supported")
    for name, kind in (("r", int), ("lora_alpha", (int, float))):
        value = config.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < LARGEST_ALPHA:
            raise ValueError(f"{CONFIG}: {name} must be a positive number, got {shown(value)}")
    return config


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        others = [x.name for x in path.parent.glob("adapter_model.*") if x.name != path.name]
        hint = f"; {', '.join(sorted(others))} is not read: only safetensors" if others else ""
        raise ValueError(f"lora_path: cannot read {path}: {error}{hint}") from error


def _low_rank(
    name: str,
    parts: dict[str, torch.Tensor],
    shape: tuple[int, int],
    config: dict[str, Any],
    max_rank: int,
) -> LowRank:
    """Return the matrices of one linear layer, after all checks."""
    rank = _setting(config, "rank_pattern", name, config["r"])
    alpha = _setting(config, "alpha_pattern", name, config["lora_alpha"])
    if parts.keys() != {"A", "B"}:
        raise ValueError(f"{WEIGHTS}: {name} has only lora_{min(parts)}")
    if not isinstance(rank, int) or not 0 < rank <= max_rank:
        raise ValueError(f"{name} has rank {shown(rank)}; max_lora_rank is {max_rank}")
    if not isinstance(alpha, (int, float)) or not abs(alpha) < LARGEST_ALPHA:
        raise ValueError(f"{CONFIG}: alpha_pattern has {shown(alpha)} for {name}")
    expected = {"A": (rank, shape[0]), "B": (shape[1], rank)}
    for letter, part in parts.items():
        if part.shape != expected[letter] or part.dtype not in DTYPES:
            raise ValueError(
                f"{WEIGHTS}: lora_{letter} of {name} must be {expected[letter]}, got "
                f"{tuple(part.shape)} of {part.dtype}"
            )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    a, b = parts["A"].float(), parts["B"].float() * scale
    for letter, part in (("A", a), ("B", b)):  # with the scale, which can make them infinite
        if not bool(part.isfinite().all()):
            raise ValueError(f"{WEIGHTS}: lora_{letter} of {name} has numbers that are not finite")
    return LowRank(a.contiguous(), b.T.contiguous())


def _setting(config: dict[str, Any], field: str, name: str, default: Any) -> Any:
    """Return the value of the first pattern that a layer's name ends with, or `default`."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{CONFIG}: {field} must be an object, got {shown(patterns)}")
    for pattern, value in patterns.items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                return value
        except re.error as error:
            raise ValueError(f"{CONFIG}: {field} has {shown(pattern)}: {error}") from error
    return default
