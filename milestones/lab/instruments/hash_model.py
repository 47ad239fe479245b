"""A model without floating point: its keys and values are hashes.

Engines run it like a Hugging Face model. `hash_chain` says what it computes, and computes the
answer from the token list alone, in plain Python.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig
from transformers.modeling_outputs import BaseModelOutput

from common import LoadedModel
from common.hf.tiny import byte_tokenizer

from .hash_chain import LAYERS, PRIME, VOCAB_SIZE, HashChain, expected_tokens, mix

__all__ = ["LOGIT", "VOCAB_SIZE", "HashChain", "HashModel", "expected_tokens", "hash_model"]

LOGIT = 9.0  # of the next token; the logits of all other tokens are 0


class HashLayer(torch.nn.Module):
    """Stores its input, and returns for each query the sum over all slots that it can see."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        paged: Any,
    ) -> torch.Tensor:
        """Return the sums modulo PRIME, [B, T] like `hidden`."""
        if self.index > 0:
            hidden = mix(hidden + position_ids, 2)
        if paged is not None:
            return self._through_pages(hidden, position_ids, paged)
        return self._through_cache(hidden, mask, cache)

    def _through_cache(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, cache: Any
    ) -> torch.Tensor:
        """Use `past_key_values`, and the mask of the engine."""
        stored = hidden.double()[:, None, :, None]  # [B, 1, T, 1]
        if cache is not None:
            keys, values = cache.update(stored, stored, self.index)
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

    def _through_pages(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, paged: Any
    ) -> torch.Tensor:
        """Store in pages, and read back through the page table."""
        meta = paged.metadata
        keys, values = paged.pool.keys[self.index], paged.pool.values[self.index]
        stored = hidden[0].double()[:, None, None]  # [T, 1, 1]
        paged.ops.store_kv(keys, values, stored, stored, meta)
        positions = torch.arange(max(meta.seq_lens_cpu))  # [S]
        pages = meta.page_table[:, positions // meta.page_size].long()  # [B, S]
        slots = pages * meta.page_size + positions % meta.page_size
        is_past = positions < torch.tensor(meta.seq_lens_cpu)[:, None]  # [B, S]
        past = values.view(-1)[slots].where(is_past, 0)
        past_keys = keys.view(-1)[slots].where(is_past, 0)
        assert not past.isnan().any(), "I1: the forward reads a slot that was never written"
        assert torch.equal(past, past_keys), "I1: keys and values come from different slots"
        owner = torch.arange(len(meta.seq_lens_cpu)).repeat_interleave(
            torch.tensor(meta.query_lens_cpu)
        )
        visible = positions <= position_ids[0, :, None]  # [T, S]
        return ((past.long()[owner] * visible).sum(dim=-1) % PRIME)[None]


class HashLayers(torch.nn.Module):
    """The layers of the model, without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(HashLayer(index) for index in range(LAYERS))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        cache: Any,
        paged: Any,
    ) -> BaseModelOutput:
        """Return the hashes as `last_hidden_state`, [B, T, 1] int64."""
        batch, num_tokens = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(num_tokens).expand(batch, -1)
        hidden = mix(input_ids * 1009 + position_ids, 1)  # [B, T]
        for layer in self.layers:
            hidden = layer(hidden, position_ids, mask, cache, paged)
        return BaseModelOutput(last_hidden_state=hidden[..., None])


class HashModel(torch.nn.Module):
    """The part of a `PreTrainedModel` that the engines use."""

    dtype = torch.float64  # holds the hashes exactly
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(
            num_hidden_layers=LAYERS, max_position_embeddings=512, vocab_size=VOCAB_SIZE
        )
        self.generation_config = GenerationConfig()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, 1)
        self.decoder = HashLayers()

    def get_decoder(self) -> HashLayers:
        return self.decoder

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> None:
        """Return None: a hash is no vector, and the next token is a hash."""

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
        """Return `.logits`, [B, kept, VOCAB_SIZE]."""
        output = self.decoder(input_ids, position_ids, attention_mask, past_key_values, paged)
        hidden = output["last_hidden_state"][..., 0]  # [B, T]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        tokens = mix(hidden[:, keep], 3) % VOCAB_SIZE
        logits = torch.zeros(*tokens.shape, VOCAB_SIZE, dtype=self.dtype)
        return SimpleNamespace(logits=logits.scatter_(-1, tokens[..., None], LOGIT))


def hash_model() -> LoadedModel:
    """Return the hash model as a `LoadedModel`, with the byte tokenizer."""
    return LoadedModel("hash-model", HashModel().eval(), byte_tokenizer())  # type: ignore[arg-type]
