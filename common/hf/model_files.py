"""Load a Hugging Face checkpoint completely, or raise an error that says what is wrong with it.

If weights are missing in a checkpoint, transformers fills in random ones and only logs a warning.
Here each such case is an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..config import EMBEDDED_MODEL
from ..fast import read_stored
from .tiny import ARCHITECTURES, HYBRID, RANDOM, SHAPES, TINY, VISION, auto_class

logger = logging.getLogger(__name__)

OFFLINE_NAMES = [EMBEDDED_MODEL, *(RANDOM + name for name in SHAPES)]
OFFLINE_NAMES += [TINY + name for name in (*ARCHITECTURES, *HYBRID, *VISION)]
SHOWN = 3  # the most names of weights in one message
LAYER = re.compile(r"\.(\d+)\.")


def load_checkpoint(
    source: str, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and the tokenizer of a folder or a Hugging Face id.

    Raises `ValueError` if anything is missing or does not fit; it names the file or the weights.
    """
    require_whole_files(Path(source))
    config = _load_config(source)
    model = _load_weights(source, config, dtype)
    tokenizer = _load_tokenizer(source)
    _require_room(source, model, tokenizer)
    return model, tokenizer


def load_stored(source: str, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer. The weights stay as they are stored.

    folder: a converted `.gguf` file. The modules of the model need the pass `pack` or `dequantize`
    before they can compute. Raises `ValueError` if anything is missing or does not fit.
    """
    model, info = read_stored(_load_config(str(folder)), folder)
    require_all_weights(source, model, info)
    tokenizer = _load_tokenizer(str(folder))
    _require_room(source, model, tokenizer)
    return model, tokenizer


def require_whole_files(folder: Path) -> None:
    """Raise `ValueError` if a folder has only pickle files, or has a truncated safetensors file."""
    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles and not files:
        raise ValueError(
            f"{pickles[0]} is a pickle file, which can run any code when it is read. Only "
            "safetensors files are loaded: convert it (`model.save_pretrained(folder)` writes them)"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):  # reads the header and compares the file size
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is damaged or was cut short ({error}): download or write it again"
            ) from error


def _load_config(source: str) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # validators raise exceptions of many classes
        if not Path(source).exists():
            raise ValueError(_not_found(source, error)) from error
        raise ValueError(
            f"model {source!r} could not be loaded: its config.json is missing or wrong: {error}"
        ) from error
    if quantization := getattr(config, "quantization_config", None):
        get = quantization.get if isinstance(quantization, dict) else quantization.to_dict().get
        raise ValueError(
            f"model {source!r} is quantized (quant_method={get('quant_method')}), which is not "
            "supported: take the checkpoint that is not quantized, or a .gguf file"
        )
    text: Any = config.get_text_config()
    size, pad = (getattr(text, name, None) or 0 for name in ("vocab_size", "pad_token_id"))
    if pad >= size > 0:  # an added token: torch makes no embedding with it, and no engine uses it
        text.pad_token_id = None
    return config


def _not_found(source: str, error: Exception) -> str:
    """Return what to say about a name that is no folder here and no model that was downloaded."""
    near = get_close_matches(source, OFFLINE_NAMES, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    first_line = str(error).strip().splitlines()[0]
    return (
        f"model {source!r} was not found: {meant}These names need no download: "
        f"{', '.join(OFFLINE_NAMES)}. As an id of Hugging Face: {first_line}"
    )


def _load_weights(
    source: str, config: PretrainedConfig, dtype: torch.dtype | str
) -> PreTrainedModel:
    try:
        loaded: Any = auto_class(config).from_pretrained(
            source, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(f"model {source!r} could not be loaded: {error}") from error
    model: PreTrainedModel
    model, info = loaded
    require_all_weights(source, model, info)
    require_finite(source, model)
    return model


def require_all_weights(source: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise `ValueError` unless the checkpoint had each weight of the model, in the right size.

    info: what `from_pretrained` returns with `output_loading_info`. A weight that is tied to
    another one is not missing.
    """
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"model {source!r} does not fit its config.json: the checkpoint has no weights for "
            f"{_some(missing)}. Compare model_type and num_hidden_layers with the checkpoint"
        )
    if mismatched := sorted(info["mismatched_keys"]):
        sizes = [f"{name} ({list(here)}, not {list(wanted)})" for name, here, wanted in mismatched]
        raise ValueError(
            f"model {source!r} does not fit its config.json: the checkpoint has other sizes for "
            f"{_some(sizes)}. Compare the sizes in config.json with the checkpoint"
        )
    if more := _layers_too_many(model, info["unexpected_keys"]):
        raise ValueError(
            f"model {source!r} does not fit its config.json: the checkpoint has more layers than "
            f"the configuration, such as {_some(more)}. Compare num_hidden_layers"
        )
    if unexpected := sorted(info["unexpected_keys"]):
        logger.warning("%s: the model does not use these weights: %s", source, _some(unexpected))


def _layers_too_many(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected weights that exist in the model under another layer number."""
    known = {LAYER.sub(".N.", name, count=1) for name in model.state_dict()}
    return sorted(name for name in unexpected if LAYER.sub(".N.", name, count=1) in known)


@torch.inference_mode()
def require_finite(source: str, model: PreTrainedModel) -> None:
    """Raise `ValueError` if a weight contains NaN or infinite numbers.

    The sum of such a weight is not finite either, and computing the sums is cheap. Only weights
    with such a sum are examined in full.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    if not parameters:
        return
    sums = torch.stack([p.sum(dtype=torch.float32) for _, p in parameters])
    for index in (~sums.isfinite()).nonzero().flatten().tolist():
        name, parameter = parameters[index]
        if not bool(parameter.isfinite().all()):
            raise ValueError(
                f"model {source!r} has NaN or infinite numbers in {name}: the checkpoint is "
                "damaged, or its dtype is too small for its weights"
            )


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"the tokenizer of {source!r} could not be loaded: {error}") from error


def _require_room(source: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` if the tokenizer's own vocabulary is larger than the embedding.

    Added tokens may be outside of it: many fine-tuned models add a padding token and do not resize
    the embedding. Requests that use such a token are refused.
    """
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    added = {i for i in tokenizer.added_tokens_decoder if i >= tokenizer.vocab_size}
    largest = max({*tokenizer.get_vocab().values()} - added, default=0)
    if largest >= len(weight):
        raise ValueError(
            f"the tokenizer of {source!r} has token ids up to {largest}, and the model's "
            f"vocabulary only {len(weight)} (vocab_size): they belong to different models"
        )


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
