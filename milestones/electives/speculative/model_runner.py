"""`ModelRunner`: a step samples a token behind each draft, with the draw of its position."""

from __future__ import annotations

import numpy as np
import torch

from common.sampling.sampler import SamplingMetadata, map_tensors

from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step, StepResult
from .placeholders import PADDING_INDEX, future_index
from .schedule_batch import ScheduleBatch

__all__ = ["ModelRunner", "Step", "StepResult"]


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model over the KV pool. Drafts are rows of the step as all others."""

    def prepare(self, batch: ScheduleBatch) -> Step:
        if not batch.drafts:
            return super().prepare(batch)
        upload = self.buffers[0].upload
        inputs, outputs = self.inputs.prepare(batch), batch.outputs
        sampled = [request for request, _before in outputs]
        metadata = SamplingMetadata.from_requests(sampled, "cpu")
        if metadata.draws is not None:  # I2: the position of a token decides its draw
            metadata.draws.positions += torch.tensor([before for _request, before in outputs])
        # The next step after drafts is planned when their fate is known: nothing to look up.
        rows = [PADDING_INDEX if r in batch.drafts else future_index(r.row) for r in sampled]
        futures = upload(torch.from_numpy(np.array(rows, np.int64)))
        return Step(inputs, map_tensors(metadata, upload), futures)
