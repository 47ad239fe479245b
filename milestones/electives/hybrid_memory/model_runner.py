"""`ModelRunner`: layers attend through the pages of their groups, or continue their states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.hf.probe import Probe
from common.hf.support import LayerKV, check_paged, refuse, start_probe

from . import hybrid_attention
from .attention import use_paged_attention
from .cuda_graph import DecodeGraphs
from .in_flight import num_rows
from .kv_pool import KVPool
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import StepResult
from .model_input import InputBuilder, ModelInput
from .recurrent import recurrent_layers, unsupported_state
from .state_pool import StatePool, StateStep
from .state_slots import Loads

__all__ = ["ModelRunner", "StepResult"]

ATTENTION = frozenset({"sliding_window", "softcap", "s_aux"})  # what `hybrid_attention` obeys
RECURRENT_LAYERS = {"linear_attention", "hybrid"}  # hybrid: attention beside a recurrence


class ModelRunner(M5ModelRunner):
    """Serves windows, soft caps, sinks and states. Other models run as in m5."""

    def probe(self, model: PreTrainedModel, config: EngineConfig) -> tuple[Probe, list[LayerKV]]:
        assert config.max_model_len is not None
        self.config = config
        served = ATTENTION
        if recurrent_layers(model):
            refuse(model, unsupported_state(model))
            served |= RECURRENT_LAYERS
        probe, layers = start_probe(model, config.max_model_len, served)
        self.states = StatePool(model, num_rows(config))
        return probe, layers

    def check(self, probe: Probe, table: np.ndarray) -> None:
        """Compare in a larger pool, in which each group has as many pages as `table`."""
        layers, groups = self.kv_pool.layers, self.kv_pool.groups
        self.is_hybrid = len(groups) > 1 or any(layer.variants for layer in layers)
        self.ops = self._hybrid_ops() if self.is_hybrid else self.ops
        self.inputs = InputBuilder(self.config, self.buffers, groups)
        tables = np.stack([table + n * table.size for n in range(len(groups))], axis=-1)
        few = replace(self.config, num_pages=tables.size)
        self.kv_pool = KVPool(layers, few, self.model.dtype, self.model.device)
        check_paged(probe, tables, partial(self._inputs_of_probe, tables), self.forward)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        # The layers with states are changed while the lock of the model is held.
        with use_paged_attention(self.model), self.states.step(inputs.states):
            return super().forward(inputs)

    def close(self) -> None:
        super().close()
        self.states.release()

    def _decode_graphs(self, config: EngineConfig) -> DecodeGraphs:
        # No graph can replay attention in torch, or layers that compute request by request.
        can_replay = self.ops is not hybrid_attention and not self.states.groups
        return super()._decode_graphs(replace(config, cuda_graph=config.cuda_graph and can_replay))

    def _hybrid_ops(self) -> ModuleType:
        """Return the operations for windows, soft caps and sinks: kernels where m5 has kernels."""
        if self.ops.__name__.endswith(".triton_ops"):
            from . import hybrid_kernels

            return hybrid_kernels
        return hybrid_attention

    def _inputs_of_probe(self, tables: np.ndarray, *args: Any) -> ModelInput:
        """Return the inputs of a step of the probe, with the states of its requests."""
        _tokens, _positions, page_table, query_lens, seq_lens, _sampled = args
        inputs = self.inputs.flatten(*args)
        rows = [tables[:, 0, 0].tolist().index(page) for page in page_table[:, 0, 0]]
        new = [row for row, q, s in zip(rows, query_lens, seq_lens, strict=True) if q == s]
        starts: Loads = [(row, None) for row in new]
        inputs.states = StateStep(rows, query_lens, starts)
        return inputs
