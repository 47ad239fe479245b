"""`DecodeGraphs`: two graphs for each size, one for steps with adapters and one for the others."""

from __future__ import annotations

from dataclasses import replace

from .m5_cuda_graph import CUDAGraphMode, StaticStep, garbage_kept, graph_sizes, waits_refused
from .m5_cuda_graph import DecodeGraphs as M5DecodeGraphs
from .model_input import BatchDescriptor, ModelInput
from .schedule_batch import ScheduleBatch

__all__ = [
    "CUDAGraphMode",
    "DecodeGraphs",
    "StaticStep",
    "garbage_kept",
    "graph_sizes",
    "waits_refused",
]


class DecodeGraphs(M5DecodeGraphs):
    """Runs decode batches of fixed sizes. A step without adapters does not pay for products."""

    def dispatch(self, batch: ScheduleBatch) -> tuple[CUDAGraphMode, BatchDescriptor]:
        mode, descriptor = super().dispatch(batch)
        return mode, BatchDescriptor(descriptor.num_reqs, has_lora=any(batch.slots))

    def _make(self, inputs: ModelInput) -> StaticStep:
        lora = inputs.lora and replace(inputs.lora, slots=inputs.lora.slots.clone())
        return super()._make(replace(inputs, lora=lora))
