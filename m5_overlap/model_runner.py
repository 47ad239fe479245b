"""`ModelRunner`: a scheduled batch becomes tensors, a forward of the model, a sampled token each.

The host prepares the tensors and launches the rest: resolving futures, forward, sampling, storing
futures and the copy of the tokens to the host run on the forward stream. Nothing here waits.

Upholds I1: the position of a fed token is the number of tokens before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.model_probe import Probe
from common.model_support import LayerKV, mixed_steps, refusing, start_probe
from common.sampler import SampledToken, SamplerOutput, SamplingMetadata, map_tensors, sample

from . import attention, cpu_ops
from .attention import AttentionMetadata, PagedBatch, use_paged_attention
from .buffers import StepBuffers
from .cuda_graph import DecodeGraphs, graph_sizes
from .future_map import PADDING_INDEX, FutureMap, index_of
from .in_flight import num_rows
from .kv_cache import PageTable
from .kv_pool import KVPool
from .scheduler import ScheduleBatch
from .stream import Event, open_stream


@dataclass
class ModelInput:
    """One forward's tensors: the tokens of all requests, one after the other."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    sampled: torch.Tensor  # [N] indices in T: the last token of each request that gets a next one
    metadata: AttentionMetadata
    is_static: bool = False  # decodes, padded to a size that `DecodeGraphs` knows


class StepResult:
    """The tokens of a step that has been launched."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.done: Event | None = None  # behind the copy of the tokens to the host
        self.output = SamplerOutput.empty()  # on the host; not to be read before `done`

    def wait(self) -> list[SampledToken]:
        """Wait until the step has been computed. Raises what its forward raised."""
        assert self.done is not None, "a step is launched before it is waited for"
        self.done.wait()
        self.buffers.in_use = None
        return list(self.output.rows())


class ModelRunner:
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises `UnsupportedModelError` for a model whose answers would be wrong."""
        assert config.max_model_len is not None
        probe, layers = start_probe(model, config.max_model_len)
        self.model = model
        self.ops = select_ops(config.attention_backend, model.device, model.dtype)
        self.stream = open_stream(model.device, config.emulated_forward_ms)
        self.buffers = deque(StepBuffers(model.device) for _ in range(2))
        self._check_model(probe, layers, config)
        self.kv_pool = KVPool(layers, config, model.dtype, model.device)
        max_pages = -(-config.max_model_len // config.page_size)
        # The page table as a tensor; what the scheduler changed is copied before each step. It and
        # the futures have a row more than the requests: row 0 is for padding.
        self.page_table = torch.zeros(index_of(num_rows(config)), max_pages, dtype=torch.int32)
        self.future_map = FutureMap(num_rows(config), model.device)
        self.graphs = self._decode_graphs(config)

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch, table: PageTable) -> StepResult:
        """Have computed what is scheduled, and sampled for each request whose last token is."""
        self.buffers.rotate()
        self.buffers[0].begin()
        for row, column, page in table.take_updates():
            self.page_table[index_of(row), column] = page
        result = StepResult(self.buffers[0])
        with self.stream.enqueuing():
            inputs = self._prepare(batch)
            sampled = [batch.requests[i] for i in batch.sampled]
            metadata = SamplingMetadata.from_requests(sampled, "cpu")
            metadata = map_tensors(metadata, self._upload)
            futures = torch.tensor([index_of(r.row) for r in sampled], dtype=torch.int64)
            futures = self._upload(futures)

        @torch.inference_mode()
        def forward() -> None:
            inputs.input_ids = self.future_map.resolve(inputs.input_ids)
            logits = self.graphs.run(inputs) if inputs.is_static else self._forward(inputs)
            output = sample(logits[: len(sampled)], metadata)
            self.future_map.store(futures, output.token_ids)
            result.output = map_tensors(output, result.buffers.download)

        result.done = result.buffers.in_use = self.stream.launch(forward)
        return result

    def synchronize(self) -> None:
        """Wait for all that was launched, whatever became of it."""
        self.stream.synchronize()
        for buffers in self.buffers:
            buffers.in_use = None

    def _forward(self, inputs: ModelInput) -> torch.Tensor:
        """Logits of the sampled tokens, [N, V]."""
        with use_paged_attention(self.model):
            return self.model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.sampled,
                paged=PagedBatch(self.kv_pool, inputs.metadata, self.ops),
            ).logits[0]

    def _decode_graphs(self, config: EngineConfig) -> DecodeGraphs:
        """Static decode steps. On a CPU there is one for any size: it has no graph to pad for."""
        on_gpu = self.model.device.type == "cuda"
        sizes = graph_sizes(config.max_num_seqs)
        if not on_gpu:
            sizes = list(range(1, config.max_num_seqs + 1))
        elif self.ops is attention:  # its shapes depend on lengths: nothing that could be replayed
            sizes = []
        graphs = DecodeGraphs(self._forward, sizes if config.cuda_graph else [], capture=on_gpu)
        if on_gpu and not config.lazy_cuda_graphs:
            for size in reversed(graphs.sizes):  # the largest first: the others fit in its memory
                self.buffers[0].begin()
                zeros = torch.zeros(size, dtype=torch.int64)
                table = torch.zeros(size, self.page_table.shape[1], dtype=torch.int32)
                ones, rows = [1] * size, list(range(size))
                with torch.inference_mode():
                    graphs.run(self._input([0] * size, zeros, table, ones, ones, rows))
                    torch.cuda.synchronize()
        return graphs

    def _prepare(self, batch: ScheduleBatch) -> ModelInput:
        """Lay the tokens of a batch out flat, and say where each one's keys and values go."""
        requests, counts = batch.requests, batch.num_scheduled_tokens
        spans = [
            (r.num_computed_tokens, r.num_computed_tokens + n)
            for r, n in zip(requests, counts, strict=True)
        ]
        tokens = [t for r, (a, b) in zip(requests, spans, strict=True) for t in r.token_ids[a:b]]
        rows = [index_of(request.row) for request in requests]
        sampled, width = batch.sampled, -(-max(end for _, end in spans) // self.kv_pool.page_size)
        size = self.graphs.size_for(len(requests)) if batch.is_decode else None
        if size is not None:  # a row of padding is token 0 at position 0, in the padding page
            padding = size - len(requests)
            tokens, counts = tokens + [0] * padding, counts + [1] * padding
            spans, rows = spans + [(0, 1)] * padding, rows + [PADDING_INDEX] * padding
            sampled, width = list(range(size)), self.page_table.shape[1]
        positions = torch.tensor([p for a, b in spans for p in range(a, b)])  # [T]
        contexts = [end for _start, end in spans]
        page_table = self.page_table[torch.tensor(rows), :width]  # [B, P]
        inputs = self._input(tokens, positions, page_table, counts, contexts, sampled)
        inputs.is_static = size is not None
        return inputs

    def _input(
        self,
        tokens: list[int],
        positions: torch.Tensor,
        page_table: torch.Tensor,
        counts: list[int],
        contexts: list[int],
        sampled: list[int],
    ) -> ModelInput:
        """The tensors of a flat batch, on the model's device."""
        page_size = self.kv_pool.page_size
        ends = torch.tensor(counts).cumsum(0)  # [B]
        owner = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)])  # [T] whose it is
        # I1: the slot of position p is table[p // page_size] * page_size + p % page_size. Page ids
        # are widened first: times the page size they may exceed 32 bits.
        pages = page_table[owner, positions // page_size].long()
        decodes = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        metadata = AttentionMetadata(
            slot_mapping=self._upload(pages * page_size + positions % page_size),
            query_starts=self._upload(torch.cat([ends.new_zeros(1), ends]).int()),
            seq_lens=self._upload(torch.tensor(contexts, dtype=torch.int32)),
            page_table=self._upload(page_table),
            page_size=page_size,
            num_decodes=decodes,
            num_tokens=counts,
            contexts=contexts,
        )
        return ModelInput(
            input_ids=self._upload(torch.tensor([tokens])),
            position_ids=self._upload(positions[None]),
            sampled=self._upload(ends[sampled] - 1),
            metadata=metadata,
        )

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's, on the model's device. The host does not wait."""
        return self.buffers[0].upload(tensor)

    @torch.inference_mode()
    def _check_model(self, probe: Probe, layers: list[LayerKV], config: EngineConfig) -> None:
        """Run the steps of a probe through a few pages.

        Raises `UnsupportedModelError` where the logits are not those of the plain forward.
        """
        table = probe.page_table(config.page_size)
        pool = replace(config, num_pages=table.numel())
        self.kv_pool = KVPool(layers, pool, self.model.dtype, self.model.device)
        for step in mixed_steps(probe):
            tokens = [token for span in step for token in probe.tokens_of(span)]
            positions = torch.tensor([p for span in step for p in range(span.start, span.end)])
            page_table = table[[span.row for span in step]]
            counts = [span.end - span.start for span in step]
            contexts, sampled = [span.end for span in step], list(range(len(step)))
            inputs = self._input(tokens, positions, page_table, counts, contexts, sampled)
            with refusing(self.model, probe.suspect):
                probe.check(step, self._forward(inputs))


def select_ops(backend: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module with the attention operations: torch's, the kernels in C, or the Triton kernels.

    Raises `RuntimeError` where kernels are asked for and cannot run.
    """
    compiled = cpu_ops.is_runnable(device, dtype)
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "compiled" if compiled else "torch"
    if backend == "torch":
        return attention
    if backend == "compiled":
        if not compiled:
            raise RuntimeError(
                "attention_backend='compiled' needs a C compiler, and float32 on a CPU"
            )
        return cpu_ops
    try:
        from . import triton_ops
    except ImportError as error:
        raise RuntimeError(f"attention_backend={backend!r} needs triton: {error}") from error
    triton_ops.require_runnable(device)
    return triton_ops
