"""`ModelInput`: the tensors of one forward, built from a scheduled batch.

Upholds I1: the position of an input token is the number of tokens before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from common import EngineConfig

from .attention import AttentionMetadata
from .buffers import StepBuffers
from .in_flight import num_rows
from .kv_cache import PageTable
from .placeholders import PADDING_INDEX, future_index
from .schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class BatchDescriptor:
    """What decides which graph runs a step. As only decodes have graphs, their number is enough.

    vLLM's descriptor also has the number of tokens. Its second model runner calls it
    `BatchExecutionDescriptor`.
    """

    num_reqs: int


@dataclass
class ModelInput:
    """The tokens of all requests of a step, one after the other: T tokens."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    logits_indices: torch.Tensor  # [N] indices in T of the tokens that get a next token
    metadata: AttentionMetadata
    descriptor: BatchDescriptor | None = None  # of the graph that runs this step

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that differ from step to step of one size."""
        meta = self.metadata
        ids = [self.input_ids, self.position_ids]
        return [*ids, meta.slot_mapping, meta.seq_lens, meta.page_table]


class InputBuilder:
    """Builds the input of a forward. It keeps the page table as an array on the host."""

    def __init__(self, config: EngineConfig, buffers: deque[StepBuffers]) -> None:
        """buffers: of the steps in turn. The first one belongs to the step that is prepared."""
        assert config.max_model_len is not None
        self.buffers = buffers
        self.page_size = config.page_size
        max_pages = -(-config.max_model_len // config.page_size)
        # One row more than the requests can have: row 0 is for padding.
        num_table_rows = future_index(num_rows(config))
        self.page_table = np.zeros((num_table_rows, max_pages), np.int32)

    def update_page_table(self, table: PageTable) -> None:
        """Copy what the scheduler has changed since the last step."""
        for row, column, page in table.take_updates():
            self.page_table[future_index(row), column] = page

    def prepare(
        self, batch: ScheduleBatch, descriptor: BatchDescriptor | None = None
    ) -> ModelInput:
        """Lay out the tokens of a batch one after the other, each request from its own position.

        descriptor: pad a decode batch to its number of requests, for `DecodeGraphs`.
        """
        requests, query_lens = batch.requests, batch.num_scheduled_tokens
        starts = [request.num_computed_tokens for request in requests]
        seq_lens = [start + n for start, n in zip(starts, query_lens, strict=True)]
        tokens = self.tokens_of(batch)
        rows = [future_index(request.row) for request in requests]
        sampled, width = batch.sampled_indices, -(-max(seq_lens) // self.page_size)
        if descriptor is not None:  # a padding row is token 0 at position 0, in the padding page
            padding = descriptor.num_reqs - len(requests)
            tokens, query_lens = tokens + [0] * padding, query_lens + [1] * padding
            starts, seq_lens = starts + [0] * padding, seq_lens + [1] * padding
            rows = rows + [PADDING_INDEX] * padding
            sampled = list(range(descriptor.num_reqs))
        positions = np.array([*chain(*map(range, starts, seq_lens))])  # [T]
        page_table = self.page_table[rows, :width]  # [B, P]
        inputs = self.flatten(tokens, positions, page_table, query_lens, seq_lens, sampled)
        inputs.descriptor = descriptor
        return inputs

    def tokens_of(self, batch: ScheduleBatch) -> list[int]:
        """Return the tokens that a step computes, request by request."""
        spans = ((r, r.num_computed_tokens, num) for r, num in batch.tokens_per_request())
        return [token for r, start, num in spans for token in r.token_ids[start : start + num]]

    def flatten(
        self,
        tokens: list[int],
        positions: np.ndarray,
        page_table: np.ndarray,
        query_lens: list[int],
        seq_lens: list[int],
        sampled_indices: list[int],
    ) -> ModelInput:
        """Return the tensors of a flat batch of B requests and T tokens, on the model's device.

        positions: [T]. page_table: [B, P]. query_lens: [B] tokens of each request in this step.
        seq_lens: [B] tokens of each request up to its last one in this step.

        The arithmetic is in NumPy: with so few numbers, each operation takes a third of the time
        that it takes in torch.
        """
        ends = np.cumsum(query_lens)  # [B]
        owner = np.repeat(np.arange(len(query_lens)), query_lens)  # [T] in B
        # I1: the slot of position p is table[p // page_size] * page_size + p % page_size. Page ids
        # are widened first: multiplied by the page size, they may exceed 32 bits.
        pages = page_table[owner, positions // self.page_size].astype(np.int64)
        decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
        metadata = AttentionMetadata(
            slot_mapping=self._upload(pages * self.page_size + positions % self.page_size),
            query_start_loc=self._upload(np.append(0, ends).astype(np.int32)),
            seq_lens=self._upload(np.array(seq_lens, np.int32)),
            page_table=self._upload(page_table),
            page_size=self.page_size,
            num_decodes=decodes,
            query_lens_cpu=query_lens,
            seq_lens_cpu=seq_lens,
        )
        return ModelInput(
            input_ids=self._upload(np.array([tokens])),
            position_ids=self._upload(positions[None]),
            logits_indices=self._upload(ends[sampled_indices] - 1),
            metadata=metadata,
        )

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the model's device. The host does not wait."""
        return self.buffers[0].upload(torch.from_numpy(array))
