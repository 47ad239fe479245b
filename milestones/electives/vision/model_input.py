"""`ModelInput`: the tensors of one forward, with the rows that are tokens of images.

Upholds I1: a token has the position that M-RoPE gives it, in every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .images import ImagePart
from .m5_model_input import BatchDescriptor
from .m5_model_input import InputBuilder as M5InputBuilder
from .m5_model_input import ModelInput as M5ModelInput
from .schedule_batch import ScheduleBatch

__all__ = ["BatchDescriptor", "InputBuilder", "ModelInput"]


@dataclass
class ModelInput(M5ModelInput):
    """The tokens of all requests of a step.

    `position_ids` is [1, T], or [3, 1, T] if tokens of images are among them.
    """

    image_parts: list[ImagePart] = field(default_factory=list)
    image_rows: torch.Tensor | None = None  # [I] in T: the tokens of these parts


class InputBuilder(M5InputBuilder):
    """Builds the input of a forward. The slots of tokens are those of m5."""

    def prepare(
        self, batch: ScheduleBatch, descriptor: BatchDescriptor | None = None
    ) -> ModelInput:
        inputs = super().prepare(batch, descriptor)
        assert isinstance(inputs, ModelInput)
        if any(request.images is not None for request in batch.requests):
            positions = np.zeros((3, inputs.input_ids.shape[1]), np.int64)  # padding has zeros
            positions[:, : batch.num_tokens] = self.positions(batch)
            # A step without images has the shape that m5's CUDA graphs were captured with.
            shaped = positions[:, None] if batch.image_parts else positions[:1]
            inputs.position_ids = self._upload(np.ascontiguousarray(shaped))
        if batch.image_parts:
            ranges = [np.arange(p.place, p.place + p.last - p.first) for p in batch.image_parts]
            inputs.image_parts = batch.image_parts
            inputs.image_rows = self._upload(np.concatenate(ranges))
        return inputs

    def positions(self, batch: ScheduleBatch) -> np.ndarray:
        """Return the positions of the tokens of a step, [3, T]."""
        found = []
        for request, num_tokens in batch.tokens_per_request():
            start, images = request.num_computed_tokens, request.images
            end = start + num_tokens
            axes = images.positions(start, end) if images is not None else [range(start, end)] * 3
            found.append(np.array(axes, np.int64))
        return np.concatenate(found, axis=1)

    def flatten(self, *args: Any) -> ModelInput:
        return ModelInput(**vars(super().flatten(*args)))
