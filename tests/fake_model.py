"""A model without floating point: its "keys and values" are hashes, and it forgives nothing.

Layer 0 stores a hash of (token, position). Layer 1 stores a hash of all that layer 0 can see, and
the next token is a hash of all that layer 1 can see. So any wrong slot, stale row, wrong mask or
wrong position anywhere in the past changes the answer, exactly and at once. It is driven like a
Hugging Face model; `expected_tokens` computes the answer from the token list alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig

from common import LoadedModel
from common.tiny_models import byte_tokenizer

PRIME = 2**31 - 1
VOCAB_SIZE = 259
LAYERS = 2


def mix(value: Any, salt: int) -> Any:
    """A hash of integers below PRIME, for Python ints and int64 tensors alike."""
    value = (value * 48271 + salt * 69621 + 12345) % PRIME
    value = (value * (value % 65521 + 1)) % PRIME
    return (value * 16807 + salt) % PRIME


def expected_tokens(prompt: list[int], max_tokens: int, eos: int | None = None) -> list[int]:
    """The greedy continuation, in plain Python."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        layer0 = [mix(token * 1009 + position, 1) for position, token in enumerate(tokens)]
        layer1 = [mix(sum(layer0[: p + 1]) % PRIME + p, 2) for p in range(len(tokens))]
        token = mix(sum(layer1) % PRIME, 3) % VOCAB_SIZE
        tokens.append(token)
        output.append(token)
        if token == eos:
            break
    return output


class HashModel(torch.nn.Module):
    """What the engines use of a `PreTrainedModel`."""

    dtype = torch.float64  # holds the hashes exactly
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(
            num_hidden_layers=LAYERS, max_position_embeddings=512, vocab_size=VOCAB_SIZE
        )
        self.generation_config = GenerationConfig()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, 1)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        logits_to_keep: int | torch.Tensor = 0,
        paged: Any = None,
    ) -> SimpleNamespace:
        batch, num_tokens = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(num_tokens).expand(batch, -1)
        hidden = mix(input_ids * 1009 + position_ids, 1)  # [B, T]
        for layer in range(LAYERS):
            if layer > 0:
                hidden = mix(hidden + position_ids, 2)
            if paged is not None:
                hidden = self._paged_layer(layer, hidden, position_ids, paged)
            else:
                hidden = self._layer(layer, hidden, attention_mask, past_key_values)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        token = mix(hidden[:, keep], 3) % VOCAB_SIZE
        return SimpleNamespace(logits=torch.nn.functional.one_hot(token, VOCAB_SIZE).double() * 9)

    def _layer(
        self, index: int, hidden: torch.Tensor, mask: torch.Tensor | None, cache: Any
    ) -> torch.Tensor:
        """The sum, modulo PRIME, of everything a query may see: [B, T]."""
        stored = hidden.double()[:, None, :, None]  # [B, 1, T, 1]
        if cache is not None:
            keys, values = cache.update(stored, stored, index)
            assert torch.equal(keys, values), "I1: keys and values come from different slots"
            stored = values
        num_slots, num_tokens = stored.shape[2], hidden.shape[1]
        if mask is None:
            visible = torch.ones(num_tokens, num_slots, dtype=torch.bool)
            visible = visible.tril(num_slots - num_tokens)[None, None]
        else:
            visible = mask == 0  # [B or 1, 1, T, S]
        seen = stored[:, 0, None, :, 0].long() * visible[:, 0].long()  # [B, T, S]
        return seen.sum(dim=-1) % PRIME

    def _paged_layer(
        self, index: int, hidden: torch.Tensor, position_ids: torch.Tensor, paged: Any
    ) -> torch.Tensor:
        """The same, stored in pages and read back through the page table: [1, T]."""
        meta, keys, values = paged.metadata, paged.pool.keys[index], paged.pool.values[index]
        stored = hidden[0].double()[:, None, None]  # [T, 1, 1]
        paged.ops.store_kv(keys, values, stored, stored, meta)
        seen, start = [], 0
        for row, (count, context) in enumerate(zip(meta.num_tokens, meta.contexts, strict=True)):
            positions = torch.arange(context)
            pages = meta.page_table[row, positions // meta.page_size].long()
            slots = pages * meta.page_size + positions % meta.page_size
            past = values.flatten(1, 2)[0, slots, 0]
            assert torch.equal(past, keys.flatten(1, 2)[0, slots, 0]), "I1: not the same slots"
            assert not past.isnan().any(), "I1: a slot is read that nobody has written"
            visible = positions <= position_ids[0, start : start + count, None]
            seen.append((past.long() * visible).sum(dim=-1) % PRIME)
            start += count
        return torch.cat(seen)[None]


def fake_model() -> LoadedModel:
    """The hash model behind the loader's interface, with the byte tokenizer."""
    return LoadedModel("hash-model", HashModel().eval(), byte_tokenizer())  # type: ignore[arg-type]
