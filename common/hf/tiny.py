"""Random models and a byte-level tokenizer, created in memory.

Tiny ones are used in tests, and if no real model is available. Their text has no meaning, but it is
varied. A model that repeats one token would hide wrong keys and values.

Random models with the shapes of real ones are for benchmarks without a download: a forward takes as
long as that of the real model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import chain, islice, product
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

TINY, RANDOM = "tiny-", "random-"  # names of models begin with them
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What an architecture needs in addition to the common shape. Architectures that can use
# grouped-query attention use it: with one KV head, or with one for each query head, a test could
# not detect a wrong mapping of heads.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "phi3": {"num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2, "logits_scaling": 2.0},
    "gpt2": {"activation_function": "gelu_new"},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}

# Models with layers that see only the last tokens, or that keep a state instead of tokens. The
# milestones from m2 on refuse them, and the elective `hybrid_memory` serves them.
HYBRID: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip

# Models with a vision encoder: the fields of its configuration. All engines serve their text, and
# the elective `vision` also images.
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}  # fmt: skip
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# ChatML with parts: each image is one `<|image_pad|>` between its marks.
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}",
)

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # of benchmarks: the architecture, its fields
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip

_one_at_a_time = threading.Lock()  # all threads share the random state of torch


def is_random(name: str) -> bool:
    """Return whether `name` is the name of a random model, known or unknown."""
    return name.startswith((TINY, RANDOM))


def load_random(
    name: str, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a random model, `tiny-llama` or `random-qwen3-0.6b`. On one device, it never varies.

    A tiny model is always made on the CPU, in float32. Raises `ValueError` for a name that is in
    none of the tables above.
    """
    if name.startswith(TINY):
        return _load_tiny(name.removeprefix(TINY))
    if (shape := name.removeprefix(RANDOM)) not in SHAPES:
        raise ValueError(_unknown(name, RANDOM, SHAPES))
    architecture, fields = SHAPES[shape]
    tokenizer = byte_tokenizer(fields["vocab_size"])
    return _random_model(architecture, tokenizer, fields, device, dtype), tokenizer


def _load_tiny(architecture: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if architecture not in (known := ARCHITECTURES | HYBRID | VISION):
        raise ValueError(_unknown(TINY + architecture, TINY, known))
    sees = architecture in VISION
    tokenizer = byte_tokenizer(more=VISION_TOKENS if sees else [])
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # large, so that the output varies
        **({} if sees else known[architecture]),
    }
    if sees:
        tokenizer.chat_template = VISION_TEMPLATE
        fields = _with_encoder(tokenizer, fields, VISION[architecture])
    return _random_model(
        architecture, tokenizer, fields, torch.device("cpu"), torch.float32
    ), tokenizer


def _with_encoder(
    tokenizer: PreTrainedTokenizerBase, text: dict[str, Any], encoder: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a model with a vision encoder. text: those of its language model."""
    eos, sections = tokenizer.eos_token_id, {"rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, VISION_TOKENS)
    return {
        "text_config": {
            "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", **sections},
            "bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos, **text,
        },
        "vision_config": {
            "depth": 2, "num_heads": 2, "patch_size": 4, "initializer_range": 0.3, **encoder,
        },
        "vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image,
        "video_token_id": video,
    }  # fmt: skip


def _unknown(name: str, prefix: str, known: Iterable[str]) -> str:
    names = ", ".join(prefix + one for one in known)
    return f"model {name!r} is not one of the {prefix[:-1]} models: {names}"


def _random_model(
    architecture: str, tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any],
    device: torch.device, dtype: torch.dtype,
) -> PreTrainedModel:  # fmt: skip
    eos = tokenizer.eos_token_id
    ends = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos}
    config = config_class(architecture)(**({} if architecture in VISION else ends), **fields)
    devices = [device] if device.type == "cuda" else []
    with _one_at_a_time, torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(0)
        return auto_class(config).from_config(config, dtype=dtype).eval()


def auto_class(config: PretrainedConfig) -> Any:
    """Return Hugging Face's class that makes a model of a configuration."""
    return AutoModelForImageTextToText if config.model_type in VISION else AutoModelForCausalLM


def config_class(architecture: str) -> Any:
    """Return Hugging Face's class for the configuration of an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[architecture]


def byte_tokenizer(
    size: int = 256 + len(SPECIAL_TOKENS), more: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token for each byte, three special tokens, and ChatML.

    An emoji takes four tokens. With a larger `size`, there are also tokens of several bytes, which
    are decoded but never made from text. more: special tokens beside these.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [character for character in alphabet if character.isascii() and character.isalpha()]
    words = map("".join, chain(product(letters, repeat=2), product(letters, repeat=4)))
    names = islice(chain(alphabet, words), size - len(SPECIAL_TOKENS))
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=[*SPECIAL_TOKENS[1:], *more],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
