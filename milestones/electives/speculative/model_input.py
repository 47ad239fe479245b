"""`ModelInput`: the tensors of one forward, with drafts after the newest tokens.

Upholds I1: drafts are at the positions that they would have if they were right.
"""

from __future__ import annotations

import numpy as np

from .m5_model_input import BatchDescriptor, ModelInput
from .m5_model_input import InputBuilder as M5InputBuilder
from .schedule_batch import ScheduleBatch

__all__ = ["BatchDescriptor", "InputBuilder", "ModelInput"]


class InputBuilder(M5InputBuilder):
    """Builds the input of a forward. Each draft gets logits, too."""

    def prepare(
        self, batch: ScheduleBatch, descriptor: BatchDescriptor | None = None
    ) -> ModelInput:
        inputs = super().prepare(batch, descriptor)
        if batch.drafts:
            inputs.logits_indices = self._upload(self._places_of_outputs(batch))
        return inputs

    def tokens_of(self, batch: ScheduleBatch) -> list[int]:
        spans = ((r, r.num_computed_tokens, num) for r, num in batch.tokens_per_request())
        own = ((r, r.token_ids[start : start + num]) for r, start, num in spans)
        return [token for r, tokens in own for token in tokens + batch.drafts_of(r)]

    def _places_of_outputs(self, batch: ScheduleBatch) -> np.ndarray:
        """Return the indices in T of all tokens that get a next token, drafts included: [N]."""
        ends = np.cumsum(batch.num_scheduled_tokens)
        counts = [1 + len(batch.drafts_of(request)) for request in batch.sampled_requests]
        firsts = ends[batch.sampled_indices] - counts
        return np.concatenate([f + np.arange(n) for f, n in zip(firsts, counts, strict=True)])
