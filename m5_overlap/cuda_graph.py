"""`DecodeGraphs`: decode steps of a few fixed sizes, replayed as CUDA graphs.

Launching the hundreds of kernels of a forward one by one takes the host longer than a GPU needs to
run them for one token a request. A graph is launched as one. It repeats what was captured, on the
same memory: so inputs are copied into static tensors first, and a batch is padded to the next size
that there is a graph of.

    sizes     1  2  4  8  16  24  ...        a batch of 5 runs as one of 8
    rows      a  b  c  d  e  | 0  0  0       rows of padding write to the padding page

Its grids and shapes are those of the size, lengths come from tensors: the static page table is as
wide as the longest request. On a CPU the same code runs, static tensors, padding and all, but the
forward is called, not replayed.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .model_runner import ModelInput

SIZE_STEP = 8  # sizes are 1, 2, 4, and then multiples of this
WARM_UPS = 2  # forwards before a capture: the first ones compile kernels and set libraries up

logger = logging.getLogger(__name__)
Forward = Callable[["ModelInput"], torch.Tensor]  # logits of the sampled tokens, [N, V]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to capture, ascending; the last one holds any decode batch."""
    sizes = [1, 2, 4, *range(SIZE_STEP, max_num_seqs + SIZE_STEP, SIZE_STEP)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


@dataclass
class StaticStep:
    """The tensors of one size: what a graph reads, and what it writes."""

    inputs: ModelInput
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None  # [S, V], once captured

    def fill(self, inputs: ModelInput) -> None:
        """Copy a step's inputs into the static ones. Every row is written: none is stale."""
        for static, tensor in zip(_tensors(self.inputs), _tensors(inputs), strict=True):
            static.copy_(tensor)
        # What the host knows of the lengths is for attention without kernels; graphs ignore it.
        self.inputs.metadata = replace(
            self.inputs.metadata, contexts=list(inputs.metadata.contexts)
        )


class DecodeGraphs:
    """Runs decode batches of the sizes it knows. All graphs share one pool of memory: only one
    runs at a time, and its logits are used before the next."""

    def __init__(self, forward: Forward, sizes: list[int], capture: bool) -> None:
        """sizes: ascending; none for no graphs. capture: false where there is no GPU."""
        self.forward = forward
        self.sizes = sizes
        self.capture = capture
        self.steps: dict[int, StaticStep] = {}
        self.pool = torch.cuda.graph_pool_handle() if capture else None

    def size_for(self, num_requests: int) -> int | None:
        """The size that a decode batch is padded to. None: no graph is so large, it runs as is."""
        place = bisect_left(self.sizes, num_requests)
        return self.sizes[place] if place < len(self.sizes) else None

    def run(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [S, V] of a batch that has been padded to one of the sizes."""
        size = inputs.input_ids.shape[1]
        if size not in self.steps:
            self.steps[size] = self._make(inputs)
        step = self.steps[size]
        step.fill(inputs)
        if step.graph is None:
            return self.forward(step.inputs)
        step.graph.replay()
        assert step.logits is not None, "a captured graph has logits"
        return step.logits

    def _make(self, inputs: ModelInput) -> StaticStep:
        """Static tensors like these; on a GPU, with a graph."""
        meta = inputs.metadata
        static = replace(
            inputs,
            input_ids=inputs.input_ids.clone(),
            position_ids=inputs.position_ids.clone(),
            sampled=inputs.sampled.clone(),
            metadata=replace(
                meta,
                slot_mapping=meta.slot_mapping.clone(),
                query_starts=meta.query_starts.clone(),
                seq_lens=meta.seq_lens.clone(),
                page_table=meta.page_table.clone(),
            ),
        )
        step = StaticStep(static)
        if self.capture:
            self._capture(step)
        return step

    def _capture(self, step: StaticStep) -> None:
        """Record a forward. A model whose forward cannot be recorded runs without graphs."""
        for _ in range(WARM_UPS):
            self.forward(step.inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                step.logits = self.forward(step.inputs)
        except RuntimeError as error:
            logger.warning("this model runs without CUDA graphs: %s", error)
            self.sizes, self.capture = [], False
            return
        step.graph = graph


def _tensors(inputs: ModelInput) -> list[torch.Tensor]:
    """What differs from step to step of one size."""
    meta = inputs.metadata
    return [
        inputs.input_ids, inputs.position_ids, meta.slot_mapping, meta.seq_lens, meta.page_table,
    ]  # fmt: skip
