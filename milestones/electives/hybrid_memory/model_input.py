"""`ModelInput`: the tensors of one forward, with the pages of each group, and the states.

Upholds I1: in each group, a request has the same tokens at the same positions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from common import EngineConfig

from .attention import AttentionMetadata
from .buffers import StepBuffers
from .hybrid_kv_cache import HybridPageTable
from .in_flight import num_rows
from .kv_cache import PageTable
from .kv_groups import FULL_ATTENTION, Groups
from .m5_model_input import BatchDescriptor
from .m5_model_input import InputBuilder as M5InputBuilder
from .m5_model_input import ModelInput as M5ModelInput
from .placeholders import future_index
from .schedule_batch import ScheduleBatch
from .state_pool import StateStep
from .state_slots import Loads, Saves


@dataclass
class ModelInput(M5ModelInput):
    """The tokens of all requests of a step, and their states."""

    metadata: AttentionMetadata
    states: StateStep = field(default_factory=lambda: StateStep([], []))

    def tensors(self) -> list[torch.Tensor]:
        found = super().tensors()
        for window in self.metadata.windows:
            found += [window.slot_mapping, window.seq_lens, window.page_table]
        return found


class InputBuilder(M5InputBuilder):
    """Builds the input of a forward. An entry of the page table has a page of each group."""

    def __init__(
        self, config: EngineConfig, buffers: deque[StepBuffers], groups: Groups = FULL_ATTENTION
    ) -> None:
        super().__init__(config, buffers)
        self.groups = groups
        self.num_rows = num_rows(config)
        self.page_table = np.zeros((*self.page_table.shape, len(groups)), np.int32)
        self.copies: tuple[Loads, Saves] = [], []  # of states, for the step that is prepared

    def update_page_table(self, table: PageTable) -> None:
        assert isinstance(table, HybridPageTable)
        for row, column, page in table.take_updates():
            number, row = divmod(row, self.num_rows)
            self.page_table[future_index(row), column, number] = page
        for states in table.allocator.states:
            self.copies = states.take_copies()

    def prepare(
        self, batch: ScheduleBatch, descriptor: BatchDescriptor | None = None
    ) -> ModelInput:
        inputs = super().prepare(batch, descriptor)
        assert isinstance(inputs, ModelInput)
        rows = [request.row or 0 for request in batch.requests]
        inputs.states = StateStep(rows, batch.num_scheduled_tokens, *self.copies)
        return inputs

    def flatten(
        self, tokens: list[int], positions: np.ndarray, page_table: np.ndarray, *lengths: Any
    ) -> ModelInput:
        """page_table: [B, P, groups], or [B, P] for one group."""
        first, *others = np.moveaxis(np.atleast_3d(page_table), 2, 0)
        inputs = ModelInput(**vars(super().flatten(tokens, positions, first, *lengths)))
        for group, pages in zip(self.groups[1:], others, strict=True):
            metadata = super().flatten(tokens, positions, pages, *lengths).metadata
            assert isinstance(metadata, AttentionMetadata)
            inputs.metadata.windows.append(replace(metadata, window=group.window))
        return inputs
