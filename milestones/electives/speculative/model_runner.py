"""`ModelRunner`: a step samples a token after each draft, too."""

from __future__ import annotations

import numpy as np
import torch

from common.sampling.logprobs import PromptTokens
from common.sampling.sampler import SamplingMetadata, map_tensors

from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step, StepResult
from .placeholders import PADDING_INDEX
from .schedule_batch import ScheduleBatch

__all__ = ["ModelRunner", "Step", "StepResult"]


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model. Each token and each draft has a draw of its own."""

    def prepare(self, batch: ScheduleBatch) -> Step:
        if not batch.drafts:
            return super().prepare(batch)
        requests = [request for request, _before in batch.outputs]
        positions = [len(request.token_ids) + before for request, before in batch.outputs]
        prompts = PromptTokens.of_step(zip(batch.requests, batch.num_scheduled_tokens), "cpu")
        metadata = SamplingMetadata.from_requests(requests, "cpu", positions, prompts)
        upload = self.buffers[0].upload
        # The next step is planned when the fate of the drafts is known: nothing to look up.
        nowhere = torch.from_numpy(np.full(len(requests), PADDING_INDEX, np.int64))
        return Step(self.inputs.prepare(batch), map_tensors(metadata, upload), upload(nowhere))
