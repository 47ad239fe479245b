"""Random weights in each format, and GGUF files of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from common.fast.stored.formats import FORMATS
from common.fast.stored.gguf import BLOCKS
from common.fast.stored.weight import DTYPES, StoredWeight
from tests.conftest import plain_model
from tests.helpers.tiny_configs import tiny_config

QUANTIZED = tuple(BLOCKS)
NUMBERS = {
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q8_0": (0,),
}  # where a block has float16
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def random_blocks(kind: str, out: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return a random weight of a GGUF file, [out, bytes of a row]. Its numbers are finite."""
    random = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (out, inputs // block, size), dtype=np.uint8)
    for at in NUMBERS.get(kind, (0, 2)):
        numbers = random.normal(scale=0.01, size=(*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8)
    return blocks.reshape(out, -1)


def dequantized(kind: str, rows: NDArray[np.uint8]) -> torch.Tensor:
    """Return a weight of a GGUF file as float32, by the package `gguf`."""
    return torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))


def random_weight(name: str, out: int, inputs: int, panel_size: int) -> StoredWeight:
    """Return a random weight in a format."""
    format = FORMATS[name]
    if format.is_float:
        return StoredWeight.of_floats(torch.randn(out, inputs).to(DTYPES[name]), panel_size)
    rows = random_blocks(name, out, inputs)
    blocks = rows.reshape(out, inputs // format.block, -1)
    return StoredWeight.of_quanta(BLOCKS[name](blocks), format, panel_size)


class GgufModel:
    """A tiny model in a GGUF file, and the same model with the same numbers in float32."""

    def __init__(self, file: Path, architecture: str, kinds: Sequence[str], **values: Any) -> None:
        """kinds: the types of its matrices, in turn. values: of its configuration."""
        config = tiny_config(architecture, **{**SIZES, **values})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: Any = AutoModelForCausalLM.from_config(config).eval()
            for name, parameter in self.model.named_parameters():
                if name.endswith(("norm.weight", "bias")):
                    torch.nn.init.normal_(parameter, mean=0.5)
        self.file, self.config, self.kinds = file, config, list(kinds)
        self.architecture = config.model_type.removesuffix("_text")

    def write(self, change: Callable[[Any], None] = lambda writer: None) -> Path:
        """Write the file. change: a function that may add metadata or tensors to the writer."""
        writer = gguf.GGUFWriter(self.file, self.architecture)
        self._describe(writer)
        arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == self.architecture)
        names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
        state, turn = self.model.state_dict(), 0
        for name, weight in state.items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            path, leaf = name.rsplit(".", 1)
            target = f"{names.get_name(path)}.{leaf}"
            if weight.dim() == 2:
                rows, kind = self._quantized(weight, target, self.kinds[turn % len(self.kinds)])
                writer.add_tensor(target, rows, raw_dtype=kind)
                turn += 1
            else:
                writer.add_tensor(target, self._moved(weight, target).numpy())
        change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.file

    def _quantized(self, weight: torch.Tensor, target: str, kind: str) -> tuple[Any, Any]:
        """Return the rows of a matrix in the file; put their numbers into the float32 model."""
        number = gguf.GGMLQuantizationType[kind]
        if kind in ("Q2_K", "Q4_K", "Q5_K", "Q6_K"):  # the package cannot make these
            rows: Any = random_blocks(kind, weight.shape[0], weight.shape[1], seed=len(target))
        else:
            rows = gguf.quantize(self._moved(weight, target).numpy(), number)
        back = torch.from_numpy(np.array(gguf.dequantize(rows, number)))
        weight.copy_(self._moved_back(back, target))
        return rows, number

    def _heads(self, target: str) -> int:
        """Return the number of heads if the file has their rows in another order, else 0."""
        if self.architecture != "llama":
            return 0
        heads = {
            "attn_q": self.config.num_attention_heads,
            "attn_k": self.config.num_key_value_heads,
        }
        return next((count for name, count in heads.items() if f".{name}." in target), 0)

    def _moved(self, weight: torch.Tensor, target: str) -> torch.Tensor:
        """Return a weight as the file has it: Llama's rows of a head alternate between halves."""
        if self.architecture.startswith("gemma") and "norm" in target:
            return weight + 1
        if not (heads := self._heads(target)):
            return weight
        return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)

    def _moved_back(self, weight: torch.Tensor, target: str) -> torch.Tensor:
        if not (heads := self._heads(target)):
            return weight
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)

    def _describe(self, writer: Any) -> None:
        config, tokenizer = self.config, plain_model("tiny-llama").tokenizer
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10000.0))
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        ids = tokenizer.get_vocab()
        vocabulary = sorted(ids, key=lambda token: ids[token])
        added = ["ab", "ba", "<mask>", "<pad>", "<eos>", "<bos>", "<unk>"]  # merges, and Gemma's
        vocabulary += [token for token in added if token not in ids]
        padding = [f"<unused{i}>" for i in range(config.vocab_size - len(vocabulary))]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(vocabulary + padding)
        writer.add_token_types([1] * config.vocab_size)
        writer.add_token_scores([0.0] * config.vocab_size)
        writer.add_token_merges(["a b", "b a"])
        writer.add_bos_token_id(vocabulary.index("<bos>"))
        writer.add_eos_token_id(tokenizer.eos_token_id)
