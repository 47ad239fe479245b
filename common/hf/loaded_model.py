"""`LoadedModel`: a model with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import DEFAULT_MAX_MODEL_LEN, EngineConfig
from ..parallel.group import RankGroup


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, its tokenizer, and the properties of both that the engines need."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ranks: RankGroup | None = None  # that compute the model together; None: this process alone

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding. Token ids are in [0, vocab_size).

        The tokenizer may not know all of them, and may have added tokens with larger ids.
        """
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        return weight.shape[0]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the token ids that end a sequence. Models list them in up to three places.

        An id outside the vocabulary is never sampled, so it is left out.
        """
        ids: set[int | None] = set()
        for source in (self.model.generation_config, self.model.config, self.tokenizer):
            eos = getattr(source, "eos_token_id", None)
            ids.update(eos if isinstance(eos, (list, tuple)) else [eos])
        return frozenset(i for i in ids if i is not None and 0 <= i < self.vocab_size)

    @property
    def num_positions(self) -> int | None:
        """Return the number of positions of the model, or None if it has no limit."""
        config = self.model.config.get_text_config()
        limit: int | None = getattr(config, "max_position_embeddings", None)
        return limit if limit is None or limit > 0 else None  # XLNet means no limit by -1

    def resolve_max_model_len(self, config: EngineConfig) -> int:
        """Return `config.max_model_len`, or the model's limit, at most `DEFAULT_MAX_MODEL_LEN`.

        Raises `ValueError` if `config.max_model_len` is larger than the model's limit.
        """
        limit = self.num_positions
        if config.max_model_len is None:
            return min(limit or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
        if limit is not None and config.max_model_len > limit:
            raise ValueError(
                f"max_model_len must be at most {limit}, the number of positions of {self.name}, "
                f"got {config.max_model_len}"
            )
        return config.max_model_len

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.size

    @property
    def no_prompt_logprobs(self) -> str | None:
        """Return why log probabilities of prompts cannot be computed, or None if they can be."""
        if self.num_ranks > 1:
            return "they need tensor_parallel_size=1"
        if self.model.get_decoder() is self.model:
            return f"{self.name} does not divide into layers and a head"
        return None

    def close(self) -> None:
        """End the other ranks of the model, if it has any."""
        if self.ranks is not None:
            self.ranks.close()
