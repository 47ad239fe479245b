"""`ModelRunner`: a scheduled batch becomes tensors, a forward of the model, a sampled token each.

Upholds I1: the position of a fed token is the number of tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.model_probe import Probe
from common.model_support import LayerKV, mixed_steps, refusing, start_probe
from common.sampler import SamplerOutput, SamplingMetadata, sample

from . import attention, cpu_ops
from .attention import AttentionMetadata, PagedBatch, use_paged_attention
from .kv_cache import PageTable
from .kv_pool import KVPool
from .scheduler import ScheduleBatch


@dataclass
class ModelInput:
    """One forward's tensors: the tokens of all requests, one after the other."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    sampled: torch.Tensor  # [N] indices in T: the last token of each request that gets a next one
    metadata: AttentionMetadata


class ModelRunner:
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises `UnsupportedModelError` for a model whose answers would be wrong."""
        assert config.max_model_len is not None
        probe, layers = start_probe(model, config.max_model_len)
        self.model = model
        self.ops = select_ops(config.attention_backend, model.device, model.dtype)
        self._check_model(probe, layers, config)
        self.kv_pool = KVPool(layers, config, model.dtype, model.device)
        max_pages = -(-config.max_model_len // config.page_size)
        # The page table as a tensor; what the scheduler changed is copied before each step.
        self.page_table = torch.zeros(config.max_num_seqs, max_pages, dtype=torch.int32)

    @torch.inference_mode()
    def run(self, batch: ScheduleBatch, table: PageTable) -> SamplerOutput:
        """Compute what is scheduled; sample for each request whose last token was computed."""
        for row, column, page in table.take_updates():
            self.page_table[row, column] = page
        if not batch.requests:
            return SamplerOutput.empty()
        logits = self._forward(self._prepare(batch))
        sampled = [batch.requests[i] for i in batch.sampled]
        return sample(logits, SamplingMetadata.from_requests(sampled, logits.device))

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

    def _prepare(self, batch: ScheduleBatch) -> ModelInput:
        """Lay the tokens of a batch out flat, and say where each one's keys and values go."""
        requests, counts = batch.requests, batch.num_scheduled_tokens
        spans = [
            (r.num_computed_tokens, r.num_computed_tokens + n)
            for r, n in zip(requests, counts, strict=True)
        ]
        tokens = [t for r, (a, b) in zip(requests, spans, strict=True) for t in r.token_ids[a:b]]
        positions = torch.tensor([p for a, b in spans for p in range(a, b)])  # [T]
        rows = torch.tensor([request.row for request in requests])  # [B]
        contexts = [end for _start, end in spans]
        width = -(-max(contexts) // self.kv_pool.page_size)
        page_table = self.page_table[rows, :width]  # [B, P]
        return self._input(tokens, positions, page_table, counts, contexts, batch.sampled)

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
        """A tensor of the host's, on the model's device."""
        return tensor.to(self.model.device)

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
