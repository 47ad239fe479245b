"""`ModelRunner`: runs the model once per step, and samples a token for each request."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.hf.support import require_full_attention
from common.sampling.logprobs import with_prompt_logprobs
from common.sampling.sampler import SamplerOutput, SamplingMetadata, sample

from .kv_cache import Move
from .kv_pool import KVPool
from .model_input import InputBuilder, ModelInput
from .schedule_batch import ScheduleBatch


class ModelRunner:
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises `UnsupportedModelError` for a model that would give wrong answers."""
        assert config.max_model_len is not None
        layers = require_full_attention(model, config.max_model_len)
        self.model = model
        self.inputs = InputBuilder(model.device, model.dtype)
        self.kv_pool = KVPool(layers, config, model.dtype, model.device)

    @torch.inference_mode()
    @with_prompt_logprobs
    def run(self, batch: ScheduleBatch, moves: list[Move]) -> SamplerOutput:
        """Compute the scheduled tokens, and sample the next token of each request."""
        while moves:  # a move that has been done leaves the list: a failed step repeats none
            self.kv_pool.move(moves[0])
            moves.pop(0)
        if not batch.requests:
            return SamplerOutput.empty()
        inputs = self.inputs.prepare(batch)
        metadata = SamplingMetadata.from_requests(batch.requests, self.model.device)
        return sample(self.forward(inputs), metadata)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Return the logits of each request's last token, [B, V]."""
        self.kv_pool.begin_step(inputs.rows, inputs.position_ids, inputs.longest_context)
        # Prompts end at different places: compute the logits where any of them ends, then select.
        kept, place = inputs.last_token.unique(return_inverse=True)
        logits = self.model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            past_key_values=self.kv_pool,
            use_cache=True,
            logits_to_keep=kept,
        ).logits  # [B, len(kept), V]
        return logits[torch.arange(len(logits), device=logits.device), place]  # [B, V]
