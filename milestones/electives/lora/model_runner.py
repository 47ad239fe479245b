"""`ModelRunner`: adapters move to their slots, and the forward adds their products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common import EngineConfig

from .adapters import BASE, Load
from .lora_layers import LoRALayers
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step as M5Step
from .m5_model_runner import StepResult
from .model_input import BatchDescriptor, ModelInput
from .schedule_batch import ScheduleBatch

__all__ = ["ModelRunner", "Step", "StepResult"]


@dataclass
class Step(M5Step):
    """What the host has prepared for a step."""

    loads: list[Load]


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model with the adapters of the requests of each step."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self.lora = LoRALayers(model, config)
        super().__init__(model, config)

    def prepare(self, batch: ScheduleBatch) -> Step:
        return Step(**vars(super().prepare(batch)), loads=batch.loads)

    def compute(self, step: M5Step) -> torch.Tensor:
        assert isinstance(step, Step)
        for load in step.loads:  # after the step in flight, which may read the same slot
            self.lora.write(load)
        return super().compute(step)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        with self.lora.applied(inputs.lora):
            return super().forward(inputs)

    def inputs_to_capture(self, size: int) -> list[ModelInput]:
        """Return two: a step without adapters, and one with adapters."""
        base, lora = super().inputs_to_capture(size) + super().inputs_to_capture(size)
        lora.descriptor = BatchDescriptor(size, has_lora=True)
        lora.lora = self.inputs.lora_rows(lora, [BASE] * size)
        return [base, lora]

    def close(self) -> None:
        super().close()
        self.lora.weights.clear()
