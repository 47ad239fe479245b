"""`ModelInput`: the tensors of one forward, built from a scheduled batch.

Upholds I1: the position of an input token is the number of tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.hf.support import additive_mask

from .schedule_batch import ScheduleBatch


@dataclass
class ModelInput:
    """B requests, T tokens of each. Requests with fewer than T tokens are padded on the right."""

    input_ids: torch.Tensor  # [B, T]
    position_ids: torch.Tensor  # [B, T]
    attention_mask: torch.Tensor  # [B or 1, 1, T, S], added to the scores
    rows: torch.Tensor  # [B]
    last_token: torch.Tensor  # [B] index in T of each request's last token
    longest_context: int  # S


class InputBuilder:
    """Builds the input of a forward on the model's device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def prepare(self, batch: ScheduleBatch) -> ModelInput:
        """Return the tokens [B, T] of a batch: whole prompts, or one token of each request."""
        num_tokens = batch.num_scheduled_tokens
        longest = max(num_tokens)
        scheduled = [
            request.token_ids[request.num_computed_tokens : request.num_computed_tokens + n]
            for request, n in zip(batch.requests, num_tokens, strict=True)
        ]
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in scheduled]
        starts = [request.num_computed_tokens for request in batch.requests]
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(
            longest, device=self.device
        )
        context = max(starts) + longest
        return ModelInput(
            input_ids=torch.tensor(padded, device=self.device),
            position_ids=positions,
            attention_mask=self._causal_mask(positions, context),
            rows=torch.tensor([request.row for request in batch.requests], device=self.device),
            last_token=torch.tensor(num_tokens, device=self.device) - 1,
            longest_context=context,
        )

    def _causal_mask(self, positions: torch.Tensor, context: int) -> torch.Tensor:
        """Let each query see the slots up to its own position. Later slots hold old data."""
        if positions.shape[1] == context:  # a prefill: all rows start at 0 and share one mask
            positions = positions[:1]
        slots = torch.arange(context, device=positions.device)
        visible = slots <= positions[:, None, :, None]  # [B or 1, 1, T, S]
        return additive_mask(visible, self.dtype)
