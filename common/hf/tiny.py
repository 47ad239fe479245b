"""Tiny random models and a byte-level tokenizer, created in memory.

They are used in tests, and if no real model is available. Their text has no meaning, but it is
varied. A model that repeats one token would hide wrong keys and values.
"""

from __future__ import annotations

import threading
from itertools import chain, islice, product
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

PREFIX = "tiny-"
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

_one_at_a_time = threading.Lock()  # all threads share the random state of torch


def is_tiny(name: str) -> bool:
    """Return whether `name` is the name of a tiny model, known or unknown."""
    return name.startswith(PREFIX)


def load_tiny(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a random model with a few layers, `tiny-llama` for example. The weights never vary.

    Raises `ValueError` for an architecture that is in none of the tables above.
    """
    architecture = name.removeprefix(PREFIX)
    if architecture not in (known_ones := ARCHITECTURES | HYBRID):
        known = ", ".join(PREFIX + known for known in known_ones)
        raise ValueError(f"model {name!r} is not one of the tiny models: {known}")
    tokenizer = byte_tokenizer()
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config(architecture, tokenizer))
    return model.eval(), tokenizer


def _config(architecture: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    return config_class(architecture)(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.3,  # large, so that the output varies
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **{"num_hidden_layers": 2, **(ARCHITECTURES | HYBRID)[architecture]},
    )


def config_class(architecture: str) -> Any:
    """Return Hugging Face's class for the configuration of an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[architecture]


def byte_tokenizer(size: int = 256 + len(SPECIAL_TOKENS)) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token for each byte, three special tokens, and ChatML.

    An emoji takes four tokens. With a larger `size`, there are also tokens of several bytes, which
    are decoded but never made from text.
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
        additional_special_tokens=SPECIAL_TOKENS[1:],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
