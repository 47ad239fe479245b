"""`DecodeGraphs`: two graphs for each size, one for steps with adapters and one for the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .m5_cuda_graph import DecodeGraphs as M5DecodeGraphs
from .m5_cuda_graph import StaticStep, garbage_kept, graph_sizes, waits_refused
from .model_input import ModelInput

__all__ = ["DecodeGraphs", "StaticStep", "garbage_kept", "graph_sizes", "waits_refused"]


class DecodeGraphs(M5DecodeGraphs):
    """Runs decode batches of fixed sizes. A step without adapters does not pay for products."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base_steps, self.lora_steps = self.steps, dict[int, StaticStep]()

    def run(self, inputs: ModelInput) -> torch.Tensor:
        self.steps = self.base_steps if inputs.lora is None else self.lora_steps
        return super().run(inputs)

    def _make(self, inputs: ModelInput) -> StaticStep:
        lora = inputs.lora and replace(inputs.lora, slots=inputs.lora.slots.clone())
        return super()._make(replace(inputs, lora=lora))

    def _capture(self, step: StaticStep) -> None:
        super()._capture(step)
        if not self.sizes:  # the model cannot be captured
            self.clear()

    def clear(self) -> None:
        """Drop the graphs of both kinds."""
        self.base_steps.clear()
        self.lora_steps.clear()
