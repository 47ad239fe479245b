"""`ModelRunner`: launches the model once per step, and samples tokens from its logits.

The host prepares the tensors and launches the rest on the forward stream: resolving placeholders,
the forward, sampling, storing the sampled tokens, and copying them to the host. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.engine_core import SampledToken
from common.hf.probe import Probe
from common.hf.support import LayerKV, check_paged, start_probe
from common.sampling.logprobs import PromptTokens, prompts_read
from common.sampling.sampler import (
    SamplerOutput,
    SamplingMetadata,
    map_tensors,
    sample,
)

from . import attention
from .attention import PagedBatch, use_paged_attention
from .attention_backend import select_backend
from .buffers import StepBuffers
from .cuda_graph import CUDAGraphMode, DecodeGraphs, garbage_kept, graph_sizes
from .future_map import FutureMap
from .in_flight import num_rows
from .kv_cache import PageTable
from .kv_pool import KVPool
from .model_input import BatchDescriptor, InputBuilder, ModelInput
from .placeholders import future_index
from .schedule_batch import ScheduleBatch
from .stream import Event, open_stream


@dataclass
class Step:
    """What the host has prepared for a step: tensors on the model's device."""

    inputs: ModelInput
    metadata: SamplingMetadata  # of the N requests that get a next token
    futures: torch.Tensor  # [N] where the future map stores these tokens


class StepResult:
    """The tokens of a step that has been launched."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.done: Event | None = None  # set after the tokens are copied to the host
        self.output = SamplerOutput.empty()  # on the host; must not be read before `done`

    def wait(self) -> list[SampledToken]:
        """Wait until the step has been computed. Raises what its forward raised."""
        assert self.done is not None, "wait() called before the step was launched"
        self.done.wait()
        self.buffers.in_use = None
        return list(self.output.rows())


class ModelRunner:
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    result_class = StepResult

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises `UnsupportedModelError` for a model that would give wrong answers."""
        probe, layers = self.probe(model, config)
        self.model = model
        self.ops = select_backend(config.attention_backend, model, layers, config.page_size)
        self.stream = open_stream(model.device, config.emulated_forward_ms)
        self.stream.wait_before_freeing(self)
        self.buffers = deque(StepBuffers(model.device) for _ in range(2))
        self.inputs = InputBuilder(config, self.buffers)
        self.future_map = FutureMap(num_rows(config), model.device)
        table = probe.page_table(config.page_size).numpy()
        # The pool of the check has only the pages that the probe needs.
        few = replace(config, num_pages=table.size)
        self.kv_pool = KVPool(layers, few, model.dtype, model.device)
        self.check(probe, table)
        self.kv_pool = KVPool(layers, config, model.dtype, model.device)
        self.graphs = self._decode_graphs(config)

    def probe(self, model: PreTrainedModel, config: EngineConfig) -> tuple[Probe, list[LayerKV]]:
        """Refuse models that cannot be served. Return a probe of the others, and their layers."""
        assert config.max_model_len is not None
        return start_probe(model, config.max_model_len)

    def check(self, probe: Probe, table: np.ndarray) -> None:
        """Compare the model's answers through pages with its own.

        probe: a few sequences. table: [B, P], their pages.
        """
        check_paged(probe, table, self.inputs.flatten, self.forward)

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch, table: PageTable) -> StepResult:
        """Enqueue the forward and the sampling of a scheduled batch."""
        self.buffers.rotate()
        self.buffers[0].begin()
        self.inputs.update_page_table(table)
        result = self.result_class(self.buffers[0])
        with self.stream.enqueuing(), self.buffers[0].packed():
            step = self.prepare(batch)
        done = self.stream.launch(lambda: self.run_step(step, result))
        result.done = result.buffers.in_use = done
        return result

    @torch.inference_mode()
    def run_step(self, step: Step, result: StepResult) -> None:
        """Compute a step that has been prepared. Runs on the forward stream."""
        self.choose(self.compute(step), step, result)

    def prepare(self, batch: ScheduleBatch) -> Step:
        """Make the tensors of a step on the host, and start their copies to the device."""
        mode, descriptor = self.graphs.dispatch(batch)
        inputs = self.inputs.prepare(batch, descriptor if mode is CUDAGraphMode.FULL else None)
        prompts = PromptTokens.of_step(batch.tokens_per_request(), "cpu")
        metadata = SamplingMetadata.from_requests(batch.sampled_requests, "cpu", prompts=prompts)
        metadata = map_tensors(metadata, self.buffers[0].upload)
        places = np.array([future_index(r.row) for r in batch.sampled_requests], np.int64)
        return Step(inputs, metadata, self.buffers[0].upload(torch.from_numpy(places)))

    def compute(self, step: Step) -> torch.Tensor:
        """Return the logits of a step, [N, V] or more rows. Runs on the forward stream."""
        inputs = step.inputs
        with prompts_read(self.model, step.metadata.prompts):
            return self.forward(inputs) if inputs.descriptor is None else self.graphs.run(inputs)

    def choose(self, logits: torch.Tensor, step: Step, result: StepResult) -> None:
        """Sample the next tokens, and store them for the next step and for the host."""
        step.metadata.resolve(self.future_map.resolve)  # penalties count the newest token too
        output = sample(logits[: len(step.futures)], step.metadata)
        self.future_map.store(step.futures, output.token_ids)
        result.output = map_tensors(output, result.buffers.download)

    def synchronize(self) -> None:
        """Wait until all launched work has ended, even if it failed."""
        self.stream.synchronize()
        for buffers in self.buffers:
            buffers.in_use = None

    def close(self) -> None:
        """Run the queued work, then free the memory of the engine."""
        self.stream.close()
        self.graphs.clear()
        self.kv_pool.release()

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Return the logits of the tokens at `logits_indices`, [N, V]."""
        with use_paged_attention(self.model):
            return self.model(
                input_ids=self.future_map.resolve(inputs.input_ids),
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
                paged=PagedBatch(self.kv_pool, inputs.metadata, self.ops),
            ).logits[0]

    @garbage_kept()
    def _decode_graphs(self, config: EngineConfig) -> DecodeGraphs:
        """Return the static decode steps. On a CPU there are none: no graph could replay them."""
        on_gpu = self.model.device.type == "cuda"
        # The shapes of attention in torch depend on lengths, so no graph can replay it.
        can_replay = on_gpu and self.ops is not attention
        sizes = graph_sizes(config.max_num_seqs) if can_replay else []
        max_pages = self.inputs.page_table.shape[1]
        sizes = sizes if config.cuda_graph else []
        graphs = DecodeGraphs(self.forward, sizes, max_pages, capture=on_gpu)
        if on_gpu and not config.lazy_cuda_graphs:
            for size in reversed(graphs.sizes):  # largest first: the others fit in its memory
                self.buffers[0].begin()
                with torch.inference_mode(), self.stream.enqueuing():
                    for inputs in self.inputs_to_capture(size):
                        graphs.run(inputs)
                self.stream.synchronize()
            graphs.num_replays = 0  # of steps: there was none yet
        return graphs

    def inputs_to_capture(self, size: int) -> list[ModelInput]:
        """Return the inputs of one decode step of each kind. Here: a step with padding only."""
        zeros, ones, rows = np.zeros(size, np.int64), [1] * size, list(range(size))
        table = np.zeros((size, *self.inputs.page_table.shape[1:]), np.int32)
        inputs = self.inputs.flatten([0] * size, zeros, table, ones, ones, rows)
        return [replace(inputs, descriptor=BatchDescriptor(size))]
