"""Tiny random models and a byte-level tokenizer, made on the fly: for tests, and where no real
model is at hand. Their text is noise, but it is varied: a model that repeats one token would hide
wrong keys and values."""

from __future__ import annotations

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

# What an architecture needs beside the common shape. Grouped-query attention wherever there is any:
# with as many KV heads as query heads, or one, a wrong head mapping would not show.
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


def is_tiny(name: str) -> bool:
    """Whether `name` asks for a tiny model, known or not."""
    return name.startswith(PREFIX)


def load_tiny(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A two-layer random model, `tiny-llama` for example; the same weights every time.

    Raises `ValueError` for an architecture that is not in `ARCHITECTURES`.
    """
    architecture = name.removeprefix(PREFIX)
    if architecture not in ARCHITECTURES:
        known = ", ".join(PREFIX + known for known in ARCHITECTURES)
        raise ValueError(f"model {name!r} is not one of the tiny models: {known}")
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config(architecture, tokenizer))
    return model.eval(), tokenizer


def _config(architecture: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    return _config_class(architecture)(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.3,  # large: the output varies
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **ARCHITECTURES[architecture],
    )


def _config_class(architecture: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[architecture]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, three special tokens, ChatML. An emoji takes four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: token_id for token_id, character in enumerate(alphabet)}
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
