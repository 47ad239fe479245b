"""Random models with the shapes of real ones, made on the device: benchmarks without a download.

A forward takes as long as that of the real model. The text has no meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .tiny import byte_tokenizer, config_class

PREFIX = "random-"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # the architecture, and its configuration
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def is_random(name: str) -> bool:
    """Return whether `name` is the name of a random model, known or unknown."""
    return name.startswith(PREFIX)


def load_random(
    name: str, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a random model, `random-qwen3-0.6b` for example. On one device, it is always the same.

    Raises `ValueError` for a shape that is not in `SHAPES`.
    """
    if name.removeprefix(PREFIX) not in SHAPES:
        known = ", ".join(PREFIX + known for known in SHAPES)
        raise ValueError(f"model {name!r} is not one of the random models: {known}")
    architecture, shape = SHAPES[name.removeprefix(PREFIX)]
    tokenizer = byte_tokenizer(shape["vocab_size"])
    config = config_class(architecture)(
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **shape,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval(), tokenizer
