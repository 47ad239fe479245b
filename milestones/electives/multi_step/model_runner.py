"""`ModelRunner`: every step of a plan has buffers of its own."""

from __future__ import annotations

from transformers import PreTrainedModel

from common import EngineConfig

from .buffers import StepBuffers
from .in_flight import NUM_STEPS
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step, StepResult

__all__ = ["ModelRunner", "Step", "StepResult"]


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        while len(self.buffers) < NUM_STEPS:  # in place, because the input builder has them, too
            self.buffers.append(StepBuffers(model.device))
