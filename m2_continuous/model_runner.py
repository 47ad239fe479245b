"""`ModelRunner`: a scheduled batch becomes tensors, a forward of the model, a sampled token each.

Upholds I1: the position of a fed token is the number of tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.model_support import additive_mask, require_full_attention
from common.sampler import SamplerOutput, SamplingMetadata, sample

from .kv_pool import KVPool
from .scheduler import ScheduleBatch


@dataclass
class ModelInput:
    """One forward's tensors. Requests with fewer than T tokens are padded on the right."""

    input_ids: torch.Tensor  # [B, T]
    position_ids: torch.Tensor  # [B, T]
    attention_mask: torch.Tensor  # [B or 1, 1, T, S], added to the scores
    rows: torch.Tensor  # [B]
    last_token: torch.Tensor  # [B] index in T of each request's last token
    longest_context: int  # S


class ModelRunner:
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises `UnsupportedModelError` for a model whose answers would be wrong."""
        assert config.max_model_len is not None
        layers = require_full_attention(model, config.max_model_len)
        self.model = model
        self.kv_pool = KVPool(layers, config, model.dtype, model.device)

    @torch.inference_mode()
    def run(self, batch: ScheduleBatch) -> SamplerOutput:
        """Compute what is scheduled and sample one token for each request."""
        if not batch.requests:
            return SamplerOutput.empty()
        inputs = self._prepare(batch)
        self.kv_pool.begin_step(inputs.rows, inputs.position_ids, inputs.longest_context)
        # Prompts end at different places: logits where any of them does, then each row its own.
        kept, place = inputs.last_token.unique(return_inverse=True)
        logits = self.model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            past_key_values=self.kv_pool,
            use_cache=True,
            logits_to_keep=kept,
        ).logits  # [B, len(kept), V]
        logits = logits[torch.arange(len(batch.requests), device=logits.device), place]  # [B, V]
        return sample(logits, SamplingMetadata.from_requests(batch.requests, logits.device))

    def _prepare(self, batch: ScheduleBatch) -> ModelInput:
        """The tokens [B, T] of a batch, T the longest: prompts of a prefill, or one token each."""
        device = self.model.device
        num_tokens = batch.num_scheduled_tokens
        longest = max(num_tokens)
        fed = [
            request.token_ids[request.num_computed_tokens : request.num_computed_tokens + n]
            for request, n in zip(batch.requests, num_tokens, strict=True)
        ]
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in fed]
        starts = [request.num_computed_tokens for request in batch.requests]
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(
            longest, device=device
        )
        context = max(starts) + longest
        return ModelInput(
            input_ids=torch.tensor(padded, device=device),
            position_ids=positions,
            attention_mask=self._causal_mask(positions, context),
            rows=torch.tensor([request.row for request in batch.requests], device=device),
            last_token=torch.tensor(num_tokens, device=device) - 1,
            longest_context=context,
        )

    def _causal_mask(self, positions: torch.Tensor, context: int) -> torch.Tensor:
        """A query sees the slots up to its own position; what lies behind is junk or padding."""
        if positions.shape[1] == context:  # a prefill: all rows start at 0 and see alike
            positions = positions[:1]
        slots = torch.arange(context, device=positions.device)
        visible = slots <= positions[:, None, :, None]  # [B or 1, 1, T, S]
        return additive_mask(visible, self.model.dtype)
