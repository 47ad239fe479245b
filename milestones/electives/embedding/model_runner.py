"""`ModelRunner`: if a step has pooling requests, sums of its hidden states are copied to the host.

Such a step never replays a CUDA graph: `ScheduleBatch.is_decode` is true only if all requests get a
token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.engine_core import SampledToken
from common.hf.hidden_states import hidden_states_read
from common.hf.probe import Probe
from common.hf.support import UnsupportedModelError, check_paged
from common.sampling.logprobs import prompts_read

from .buffers import StepBuffers
from .kv_cache import PageTable
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step as M5Step
from .m5_model_runner import StepResult as M5StepResult
from .model_input import ModelInput
from .pooling import pool, pooled_tokens
from .schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)


@dataclass
class Step(M5Step):
    """What the host has prepared for a step."""

    pooled_tokens: list[slice]  # of each pooling request
    sums: torch.Tensor | None = None  # [P, H] float32, of their hidden states


class StepResult(M5StepResult):
    """The tokens of a step that has been launched, and the sums of its pooling requests."""

    def __init__(self, buffers: StepBuffers) -> None:
        super().__init__(buffers)
        self.pooled = torch.empty(0, 0)  # [P, H] float32, on the host; not to be read before `done`

    def wait(self) -> list[SampledToken]:
        sampled = super().wait()
        self.pooled = self.pooled.clone()  # a later step writes to the buffer again
        return sampled


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model over the KV pool, and reads its hidden states."""

    result_class = StepResult

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        assert config.max_model_len is not None
        self.max_model_len = config.max_model_len
        super().__init__(model, config)

    def check(self, probe: Probe, table: np.ndarray) -> None:
        super().check(probe, table)
        self.hidden_size = self._check_states(table)  # None: pooling is refused

    def launch(self, batch: ScheduleBatch, table: PageTable) -> StepResult:
        result = super().launch(batch, table)
        assert isinstance(result, StepResult)
        return result

    def prepare(self, batch: ScheduleBatch) -> Step:
        return Step(**vars(super().prepare(batch)), pooled_tokens=pooled_tokens(batch))

    def compute(self, step: M5Step) -> torch.Tensor:
        assert isinstance(step, Step)
        if not step.pooled_tokens:
            return super().compute(step)
        with prompts_read(self.model, step.metadata.prompts):
            logits, states = self.forward_with_states(step.inputs)
        step.sums = pool(states, step.pooled_tokens)
        return logits

    def choose(self, logits: torch.Tensor, step: M5Step, result: M5StepResult) -> None:
        assert isinstance(step, Step) and isinstance(result, StepResult)
        if step.sums is not None:
            result.pooled = result.buffers.download(step.sums)
        super().choose(logits, step, result)

    def forward_with_states(self, inputs: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the tokens at `logits_indices`, [N, V], and the hidden states of all
        tokens after the final norm, [T, H].
        """
        with hidden_states_read(self.model) as states:
            logits = self.forward(inputs)
        return logits, states.of_all_tokens[0]

    def _check_states(self, table: np.ndarray) -> int | None:
        """Return the size of a hidden state; None if the model does not give hidden states, or
        gives wrong logits while they are read.
        """
        if self.model.get_output_embeddings() is None:
            return None
        size: int | None = None

        def forward(inputs: ModelInput) -> torch.Tensor:
            nonlocal size
            logits, states = self.forward_with_states(inputs)
            assert len(states) == inputs.input_ids.shape[1], "not the states of all tokens"
            size = states.shape[-1]
            return logits

        try:
            probe = Probe(self.model, self.max_model_len)
            check_paged(probe, table, self.inputs.flatten, forward)
        except UnsupportedModelError as error:
            logger.warning("this model makes no embeddings: %s", error)
            return None
        return size
