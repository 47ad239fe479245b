"""`ModelRunner`: computes the operations of the model as a variant says."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.hf.probe import Probe

from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step, StepResult
from .variants import EXACT, Variant

__all__ = ["ModelRunner", "Step", "StepResult"]


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, variant: Variant = EXACT
    ) -> None:
        self.variant = variant
        super().__init__(model, config)

    def check(self, probe: Probe, table: np.ndarray) -> None:
        """Choose the attention of the variant, and check that it reads the right pages.

        The check computes the other operations in float32: it would refuse sums in bfloat16.
        """
        if self.variant is not EXACT:
            self.ops: Any = self.variant.attention
        super().check(probe, table)

    def compute(self, step: Step) -> torch.Tensor:
        """Return the logits of a step, [N, V], and the log probabilities of its prompts."""
        with self.variant.operations():
            return super().compute(step)
