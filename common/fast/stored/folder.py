"""A folder with a model as it is stored: the configuration and the weights of a `.gguf` file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..cpu_kernels import kernels
from .convert import FREQUENCIES, config_of, converted_weights, empty_model, scale_rotation
from .file import load_weights, put_weights, save_weights

PANEL_SIZE = 32  # without kernels, the layout of stored weights does not matter


def panel_size() -> int:
    """Return how many outputs are in a panel of a weight; the kernels decide it."""
    found = kernels()
    return PANEL_SIZE if found is None else found.panel_size


def write_stored(gguf: Path, folder: Path, advance: Callable[[float], None]) -> PretrainedConfig:
    """Convert a `.gguf` file into a folder. Return the configuration of its model.

    advance: a function that is told the fraction of the weights that are done.

    Raises `ValueError` for what cannot be read.
    """
    config = config_of(gguf)
    weights = dict(converted_weights(gguf, config, panel_size(), advance))
    config.save_pretrained(folder)
    save_weights(weights, folder)
    return config


def read_stored(config: PretrainedConfig, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model with the weights of a folder, and what did not fit, as `put_weights` does.

    The modules need the pass `pack` or `dequantize` before they can compute.
    """
    model = empty_model(config)
    weights = load_weights(folder)
    factors = weights.pop(FREQUENCIES, None)
    info = put_weights(model, weights)
    if isinstance(factors, torch.Tensor):
        scale_rotation(model, factors)
    return model, info
