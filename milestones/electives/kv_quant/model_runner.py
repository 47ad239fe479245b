"""`ModelRunner`: its pages are packed after the model has been checked with pages in float."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.hf.probe import Probe

from .cuda_graph import DecodeGraphs
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import StepResult

__all__ = ["ModelRunner", "StepResult"]


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model over packed pages."""

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, line_type: torch.dtype = torch.int8
    ) -> None:
        """line_type: the type of the memory, which says the format of its lines."""
        self.line_type = line_type
        super().__init__(model, config)

    def check(self, probe: Probe, table: np.ndarray) -> None:
        """Compare the model's answers through pages with its own, in pages of float.

        Answers through packed pages differ from the model's own, so they cannot say whether an
        engine computes the model correctly.
        """
        self.kv_pool: Any = self.kv_pool.in_float()
        super().check(probe, table)

    def _decode_graphs(self, config: EngineConfig) -> DecodeGraphs:
        """Allocate the pool in its format before graphs are captured: a graph keeps the pages."""
        self.kv_pool = self.kv_pool.in_format(self.line_type)
        return super()._decode_graphs(config)
