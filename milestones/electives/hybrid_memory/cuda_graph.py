"""`DecodeGraphs`: m5's, with static tensors for the page tables of all groups."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.functional import pad

from .m5_cuda_graph import CUDAGraphMode, StaticStep, garbage_kept, graph_sizes, waits_refused
from .m5_cuda_graph import DecodeGraphs as M5DecodeGraphs
from .model_input import ModelInput

__all__ = [
    "CUDAGraphMode",
    "DecodeGraphs",
    "StaticStep",
    "garbage_kept",
    "graph_sizes",
    "waits_refused",
]


class DecodeGraphs(M5DecodeGraphs):
    """Runs decode batches of fixed sizes."""

    def _make(self, inputs: ModelInput) -> StaticStep:
        windows = [
            replace(
                window,
                slot_mapping=window.slot_mapping.clone(),
                query_start_loc=window.query_start_loc.clone(),
                seq_lens=window.seq_lens.clone(),
                page_table=pad(window.page_table, (0, self.max_pages - window.page_table.shape[1])),
            )
            for window in inputs.metadata.windows
        ]
        metadata = replace(inputs.metadata, windows=windows)
        return super()._make(replace(inputs, metadata=metadata))
