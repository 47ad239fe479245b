"""`ModelRunner`: runs the model once per step, and samples tokens from its logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.hf.probe import Probe
from common.hf.support import LayerKV, check_paged, start_probe
from common.sampling.logprobs import with_prompt_logprobs
from common.sampling.sampler import SamplerOutput, SamplingMetadata, sample

from .attention import PagedBatch, use_paged_attention
from .attention_backend import select_backend
from .kv_cache import PageTable
from .kv_pool import KVPool
from .model_input import InputBuilder, ModelInput
from .schedule_batch import ScheduleBatch


class ModelRunner:
    """Runs a Hugging Face model over the KV pool: one forward for all requests of a step."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises `UnsupportedModelError` for a model that would give wrong answers."""
        probe, layers = self.probe(model, config)
        self.model = model
        self.ops = select_backend(config.attention_backend, model, layers, config.page_size)
        self.inputs = InputBuilder(config, model.device)
        table = probe.page_table(config.page_size).numpy()
        # The pool of the check has only the pages that the probe needs.
        few = replace(config, num_pages=table.size)
        self.kv_pool = KVPool(layers, few, model.dtype, model.device)
        self.check(probe, table)
        self.kv_pool = KVPool(layers, config, model.dtype, model.device)

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
    @with_prompt_logprobs
    def run(self, batch: ScheduleBatch, table: PageTable) -> SamplerOutput:
        """Compute the scheduled tokens; sample where the last token of a request was computed."""
        self.inputs.update_page_table(table)
        if not batch.requests:
            return SamplerOutput.empty()
        inputs = self.inputs.prepare(batch)
        metadata = SamplingMetadata.from_requests(batch.sampled_requests, self.model.device)
        return sample(self.forward(inputs), metadata)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Return the logits of the tokens at `logits_indices`, [N, V]."""
        with use_paged_attention(self.model):
            return self.model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
                paged=PagedBatch(self.kv_pool, inputs.metadata, self.ops),
            ).logits[0]
