"""`ModelInput`: the tensors of one forward, with the adapter of each row.

Upholds I1: the rows of a request, and only these, have the slot of its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .adapters import BASE
from .lora_layers import LoRARows, group_rows
from .m5_model_input import BatchDescriptor as M5BatchDescriptor
from .m5_model_input import InputBuilder as M5InputBuilder
from .m5_model_input import ModelInput as M5ModelInput
from .schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class BatchDescriptor(M5BatchDescriptor):
    """The key of a graph. There are two graphs for each size."""

    has_lora: bool = False


@dataclass
class ModelInput(M5ModelInput):
    """The tokens of all requests of a step, and their slots."""

    descriptor: BatchDescriptor | None = None
    lora: LoRARows | None = None  # if a request of the step has an adapter

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *([] if self.lora is None else [self.lora.slots])]


class InputBuilder(M5InputBuilder):
    """Builds the input of a forward. A padding row has no adapter."""

    def prepare(
        self, batch: ScheduleBatch, descriptor: M5BatchDescriptor | None = None
    ) -> ModelInput:
        inputs = super().prepare(batch, descriptor)
        assert isinstance(inputs, ModelInput)
        query_lens = inputs.metadata.query_lens_cpu
        slots = batch.slots + [BASE] * (len(query_lens) - len(batch.slots))
        if any(slots):
            inputs.lora = self.lora_rows(inputs, np.repeat(slots, query_lens).tolist())
        return inputs

    def flatten(self, *args: Any) -> ModelInput:
        return ModelInput(**vars(super().flatten(*args)))

    def lora_rows(self, inputs: ModelInput, slots: Sequence[int]) -> LoRARows:
        """Return the slots of the T rows of a step, on the model's device."""
        groups = None  # the shapes of a static step must not depend on the adapters
        if inputs.descriptor is None:
            groups = [(slot, self._upload(rows.numpy())) for slot, rows in group_rows(slots)]
        return LoRARows(self._upload(np.array(slots, np.int64)), inputs.logits_indices, groups)
