"""`ModelRunner`: its pages are packed after the model has been checked with pages in float."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.hf.probe import Probe

from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import StepResult

__all__ = ["ModelRunner", "StepResult"]


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model over packed pages."""

    def check(self, probe: Probe, table: np.ndarray) -> None:
        """Compare the model's answers through pages with its own, in pages of float.

        Answers through packed pages differ from the model's own, so they cannot say whether an
        engine computes the model correctly.
        """
        self.kv_pool: Any = self.kv_pool.in_float()
        super().check(probe, table)
