"""Load a model by name: embedded, Hugging Face id, folder, `.gguf` file, or tiny random model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import EngineConfig
from ..fast import (
    StoredProductError,
    apply_passes,
    dequantize,
    has_passes,
    keep_narrow,
    kernels,
    panel_size,
    parse_passes,
    release_freed_memory,
    with_stored,
)
from ..parallel.division import Division
from ..parallel.group import RankGroup
from ..parallel.ranks import Ranks
from ..sampling.choice import kernels_on
from .device import half_type, open_device, resolve_device, resolve_dtype
from .gguf_folders import embedded_gguf, gguf_folder, is_embedded, quiet_transformers
from .loaded_model import LoadedModel
from .model_files import load_checkpoint, load_stored
from .shared import on_device
from .support import UnsupportedModelError
from .tiny import is_random, load_random

logger = logging.getLogger(__name__)


def load_model(config: EngineConfig, *, plain: bool = False) -> LoadedModel:
    """Load `config.model` in eval mode on `config.device`.

    plain: load the model without our model passes, as a reference to compare with.

    Raises `ValueError` if the model cannot be loaded, `UnsupportedModelError` (a `ValueError` too)
    if it is not a decoder, and `EmbeddedModelMissingError` if the embedded model is not installed.
    """
    device = open_device(config.device)
    if config.tensor_parallel_size > 1 and not plain:
        return _load_divided(config)
    if not plain and _can_keep_stored(config, device):
        try:
            return _load(config, device, kept=True, passes=config.model_passes)
        except StoredProductError as error:
            logger.warning("%s: its weights are unpacked to float32: %s", config.model, error)
    return _load(config, device, kept=False, passes="none" if plain else config.model_passes)


def require_readable(loaded: LoadedModel) -> None:
    """Raise `ValueError` if passes or stored weights replace lines of a model."""
    stored = next(with_stored(loaded.model), None) is not None
    if stored or has_passes(loaded.model):
        raise ValueError(
            "loaded must be a model as Hugging Face has it with readable=True, but "
            f"{loaded.name} has {'stored weights' if stored else 'passes'}: load it by "
            "load_model(EngineConfig(..., readable=True))"
        )


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that one rank has."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ranks: Ranks
    changed: dict[str, int]  # how many modules each pass changed
    weight_bytes: int


def load_part(config: EngineConfig, join: Callable[[Division, torch.device], Ranks]) -> ModelPart:
    """Load a model, and keep the part of one rank. The weights are in `config.dtype`.

    join: returns the process group, after all ranks have read the model. Raises
    `UnsupportedModelError` if `config.tensor_parallel_size` ranks cannot divide the model.
    """
    device = open_device(config.device)
    model, tokenizer = _load_weights(config, device, kept=False)
    division = Division(config.model, model, config.tensor_parallel_size)
    ranks = join(division, device)
    division.cut(ranks.rank)
    release_freed_memory()
    with on_device(device):
        changed = apply_passes(model, config.model_passes, lambda: division.connect(ranks))
        division.check()
    memories = (p.untyped_storage() for p in model.parameters())
    weights = {memory.data_ptr(): memory.nbytes() for memory in memories}  # tied weights count once
    return ModelPart(model, tokenizer, ranks, changed, sum(weights.values()))


def _load_divided(config: EngineConfig) -> LoadedModel:
    """Load the part of rank 0, and start the other ranks, which load theirs."""
    device, size = resolve_device(config.device), config.tensor_parallel_size
    if device.type == "cuda" and config.cuda_graph:
        raise ValueError(
            "tensor_parallel_size > 1 needs cuda_graph=False on a GPU: the replay of a graph does "
            "not call the model, so the other ranks would not take part in it"
        )
    if device.type == "cuda" and (device.index or torch.cuda.device_count() < size):
        raise ValueError(
            f"tensor_parallel_size={size} uses the GPUs 0 to {size - 1}, one for each rank, but "
            f"device is {config.device!r} and there are {torch.cuda.device_count()} GPUs here: "
            "set device='cuda', and a tensor_parallel_size up to the number of GPUs"
        )
    group = RankGroup(config)
    try:
        part = load_part(config, group.open)
        group.take(part.model, part.changed, part.weight_bytes)
    except BaseException:
        group.close()
        raise
    if device.type == "cuda":
        kernels_on(part.model.device, part.model.dtype)
    return LoadedModel(config.model, part.model, part.tokenizer, group)


def _can_keep_stored(config: EngineConfig, device: torch.device) -> bool:
    """Return whether weights may stay as they are stored: our own kernels must multiply them."""
    return (
        config.quantization == "auto"
        and device.type == "cpu"
        and config.dtype in ("auto", "float32")
        and "pack" in parse_passes(config.model_passes)
        and kernels() is not None
    )


def _load(config: EngineConfig, device: torch.device, *, kept: bool, passes: str) -> LoadedModel:
    """Load a model, with its weights as they are stored if `kept` is set."""
    model, tokenizer = _load_weights(config, device, kept=kept)
    with on_device(device):
        apply_passes(model, passes)
    if device.type == "cuda":
        kernels_on(model.device, model.dtype)  # so that no request waits for a compiler
    if kept and next(with_stored(model), None) is not None:
        _require_numbers(model)
        release_freed_memory()
    return LoadedModel(config.model, model, tokenizer)


def _load_weights(
    config: EngineConfig, device: torch.device, *, kept: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model on its device in eval mode, without passes, and its tokenizer."""
    dtype = resolve_dtype(config.dtype, device)
    with quiet_transformers():
        model, tokenizer = _read(config.model, dtype, device)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{config.model} is an encoder-decoder model; the engines only run decoder models"
        )
    if not kept:
        dequantize(model)
        if isinstance(dtype, torch.dtype):
            _cast(model, dtype)
        elif model.dtype == torch.bfloat16:
            _cast(model, half_type(device, dtype))
    else:
        keep_narrow(model, panel_size())
    return _to(model, device).eval(), tokenizer


def _read(
    name: str, dtype: torch.dtype | str, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if is_random(name):
        return load_random(name, device, half_type(device, dtype))
    if is_embedded(name):
        return load_stored(name, gguf_folder(embedded_gguf()))
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise ValueError(f"model {name!r} does not exist")
        return load_stored(name, gguf_folder(Path(name)))
    return load_checkpoint(name, dtype)


@torch.inference_mode()
def _require_numbers(model: PreTrainedModel) -> None:
    """Raise `StoredProductError` if the model uses the weight of a stored layer in its own way."""
    prompt = torch.tensor([[1, 2, 3]], device=model.device)
    if not bool(model(input_ids=prompt, use_cache=False).logits.isfinite().all()):
        raise StoredProductError("the model does not only multiply with them")


def _to(model: PreTrainedModel, target: torch.device | torch.dtype) -> PreTrainedModel:
    return model.to(target)  # type: ignore[arg-type]  # transformers wraps `to` without its types


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert a model to a dtype, as Hugging Face loads it in this dtype.

    The frequencies of rotary embeddings stay in float32: in 16 bits, a token at position 1,000
    would be rotated by a wrong angle.
    """
    if model.dtype == dtype:
        return
    frequencies = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    _to(model, dtype)
    for module, name, buffer in frequencies:
        setattr(module, name, buffer)
