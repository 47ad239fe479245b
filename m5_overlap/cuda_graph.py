"""`DecodeGraphs`: decode steps of a few fixed sizes, replayed as CUDA graphs.

A forward launches hundreds of kernels. For one token per request, the host needs longer to launch
them one by one than the GPU needs to run them. A CUDA graph launches all of them at once. A replay
repeats exactly what was captured, on the same memory. Therefore the inputs are copied into static
tensors first, and a batch is padded to the next size that has a graph.

    sizes     1  2  4  8  16  24  ...        a batch of 5 runs as a batch of 8
    rows      a  b  c  d  e  | 0  0  0       padding rows write to the padding page

Grids and shapes of the kernels depend on the size only, and lengths come from tensors. The static
page table is as wide as the longest request. On a CPU there are no static steps. Only tests make
them there, with forwards that are called and not replayed.
"""

from __future__ import annotations

import gc
import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch.nn.functional import pad

from .model_input import BatchDescriptor, ModelInput
from .schedule_batch import ScheduleBatch

SIZE_STEP = 8  # sizes are 1, 2, 4, and then multiples of this

logger = logging.getLogger(__name__)
Forward = Callable[[ModelInput], torch.Tensor]  # logits of the sampled tokens, [N, V]


class CUDAGraphMode(Enum):
    """How a step runs. vLLM also has `PIECEWISE`: graphs of the parts between attentions."""

    NONE = "kernel by kernel"
    FULL = "one graph"


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, ascending. The last one holds any decode batch."""
    sizes = [1, 2, 4, *range(SIZE_STEP, max_num_seqs + SIZE_STEP, SIZE_STEP)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


@dataclass
class StaticStep:
    """The tensors of one descriptor, which a graph reads and writes."""

    inputs: ModelInput
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None  # [S, V], once captured

    def fill(self, inputs: ModelInput) -> None:
        """Copy a step's inputs into the static tensors. Every row is written, so none is stale.

        The page table of a step has only the columns that the step needs. Behind them, the static
        table keeps old pages, which lie after the end of each context.
        """
        for static, tensor in zip(self.inputs.tensors(), inputs.tensors(), strict=True):
            static[..., : tensor.shape[-1]].copy_(tensor)
        # Attention without kernels reads the lengths on the host. Graphs ignore them.
        self.inputs.metadata = replace(
            self.inputs.metadata, seq_lens_cpu=list(inputs.metadata.seq_lens_cpu)
        )


class DecodeGraphs:
    """Runs decode batches of fixed sizes.

    All graphs share one memory pool, and one tensor of logits: for a large vocabulary, a tensor for
    each size would take a gigabyte. That is safe because only one graph runs at a time, and its
    logits are used before the next one runs.
    """

    def __init__(self, forward: Forward, sizes: list[int], max_pages: int, capture: bool) -> None:
        """sizes: ascending; empty for no graphs. max_pages: of the longest request.

        capture: False on a machine without a GPU.
        """
        self.forward = forward
        self.sizes = sizes
        self.max_pages = max_pages
        self.capture = capture
        self.steps: dict[BatchDescriptor, StaticStep] = {}
        self.pool = torch.cuda.graph_pool_handle() if capture else None
        self.logits: torch.Tensor | None = None  # [S, V] of the largest size so far
        self.num_replays = 0

    def dispatch(self, batch: ScheduleBatch) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """Return how a step runs, and the descriptor of the batch that the forward gets.

        A decode batch is padded to the next size. Any other batch runs as it is, and so does one
        that is larger than the largest size.
        """
        num_reqs = len(batch.requests)
        place = bisect_left(self.sizes, num_reqs)
        if batch.is_decode and place < len(self.sizes):
            return CUDAGraphMode.FULL, BatchDescriptor(self.sizes[place])
        return CUDAGraphMode.NONE, BatchDescriptor(num_reqs)

    def run(self, inputs: ModelInput) -> torch.Tensor:
        """Return the logits [S, V] of a batch that is padded to one of the sizes."""
        assert inputs.descriptor is not None, "only a padded batch has a graph"
        if inputs.descriptor not in self.steps:
            self.steps[inputs.descriptor] = self._make(inputs)
        step = self.steps[inputs.descriptor]
        step.fill(inputs)
        if step.graph is None:
            return self.forward(step.inputs)
        step.graph.replay()
        self.num_replays += 1
        assert step.logits is not None, "a captured graph has logits"
        return step.logits

    def clear(self) -> None:
        """Free the graphs and their memory."""
        self.steps.clear()
        self.logits = None

    def _make(self, inputs: ModelInput) -> StaticStep:
        """Return static tensors for a step of this size; on a GPU, with a captured graph."""
        meta = inputs.metadata
        missing = self.max_pages - meta.page_table.shape[1]  # columns: requests may grow
        static = replace(
            inputs,
            input_ids=inputs.input_ids.clone(),
            position_ids=inputs.position_ids.clone(),
            logits_indices=inputs.logits_indices.clone(),
            metadata=replace(
                meta,
                slot_mapping=meta.slot_mapping.clone(),
                query_start_loc=meta.query_start_loc.clone(),
                seq_lens=meta.seq_lens.clone(),
                page_table=pad(meta.page_table, (0, missing)),
            ),
        )
        step = StaticStep(static)
        if self.capture:
            self._capture(step)
        return step

    def _capture(self, step: StaticStep) -> None:
        """Capture a forward. If the model's forward cannot be captured, use no graphs at all.

        The graph is captured on the current stream. On a stream of its own, each graph would have
        workspaces of its own for the matrix products.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(step.inputs.input_ids.device)
        try:
            logits = self.forward(step.inputs)  # compiles kernels, and initializes libraries
            if self.logits is None or len(self.logits) < len(logits):
                self.logits = torch.empty_like(logits)
            step.logits = self.logits[: len(logits)]
            del logits
            with waits_refused():  # finds a model that cannot be captured, without a broken capture
                self.forward(step.inputs)
            with garbage_kept(), torch.cuda.graph(graph, pool=self.pool, stream=stream):
                step.logits.copy_(self.forward(step.inputs))
        except RuntimeError as error:
            logger.warning("this model runs without CUDA graphs: %s", error)
            self.sizes.clear()  # so the loop over them ends, too
            self.capture = False
            self.clear()  # without sizes, no step uses the graphs that were captured before
            return
        step.graph = graph


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect garbage now, and not inside this context.

    Garbage may contain a graph of an engine that was dropped. CUDA does not allow to destroy a
    graph during a capture. The collector stays off if it is off already. Where nothing has used
    CUDA, there are no graphs, and a collection would take a tenth of a second for nothing.
    """
    if not gc.isenabled() or not torch.cuda.is_initialized():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def waits_refused() -> Iterator[None]:
    """Inside this context, torch raises `RuntimeError` where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns that it does not yet find every wait
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
