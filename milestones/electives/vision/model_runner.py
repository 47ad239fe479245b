"""`ModelRunner`: images are encoded, and their embeddings take the places of placeholders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common import EngineConfig

from .attention import PagedBatch, use_paged_attention
from .encoder_cache import CacheChanges
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step as M5Step
from .m5_model_runner import StepResult
from .model_input import ModelInput
from .schedule_batch import ScheduleBatch
from .vision_encoder import VisionEncoder

__all__ = ["ModelRunner", "Step", "StepResult"]


@dataclass
class Step(M5Step):
    """What the host has prepared for a step."""

    changes: CacheChanges


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model, and its vision encoder."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.encoder = VisionEncoder(model)
        super().__init__(model, config)

    def prepare(self, batch: ScheduleBatch) -> Step:
        return Step(**vars(super().prepare(batch)), changes=batch.changes)

    def compute(self, step: M5Step) -> torch.Tensor:
        assert isinstance(step, Step)
        self.encoder.update(step.changes)  # after the step in flight, which may read embeddings
        return super().compute(step)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Return the logits of the tokens at `logits_indices`, [N, V]."""
        if inputs.image_rows is None:
            return super().forward(inputs)
        input_ids = self.future_map.resolve(inputs.input_ids)
        embeds = self.model.get_input_embeddings()(input_ids)  # [1, T, H]
        embeds[0, inputs.image_rows] = self.encoder.rows(inputs.image_parts).to(embeds.dtype)
        with use_paged_attention(self.model):
            return self.model(
                input_ids=input_ids,  # not embedded again
                inputs_embeds=embeds,
                position_ids=inputs.position_ids,  # [3, 1, T]
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
                paged=PagedBatch(self.kv_pool, inputs.metadata, self.ops),
            ).logits[0]

    def close(self) -> None:
        super().close()
        self.encoder.embeddings.clear()
