"""`ModelRunner`: a step with a grammar is sampled when its mask is known, after its forward.

SGLang calls this `delay_sample_func`. The logits stay on the device meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from common.engine_core import SampledToken

from .bitmask import TokenMask
from .buffers import StepBuffers
from .kv_cache import PageTable
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step
from .m5_model_runner import StepResult as M5StepResult
from .schedule_batch import ScheduleBatch
from .stream import Event

__all__ = ["ModelRunner", "Step", "StepResult"]


class StepResult(M5StepResult):
    """The tokens of a step that has been launched, perhaps without its sampling."""

    def __init__(self, buffers: StepBuffers) -> None:
        super().__init__(buffers)
        self.computed: Event | None = None  # set after the forward, if sampling is delayed
        self.choose: Callable[[TokenMask], None] | None = None  # the delayed sampling

    @property
    def is_delayed(self) -> bool:
        """Whether the forward is launched, and the sampling is not."""
        return self.choose is not None

    def wait(self) -> list[SampledToken]:
        if self.computed is not None:
            self.computed.wait()
        return super().wait()


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model over the KV pool, and applies masks to its logits."""

    result_class = StepResult

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch, table: PageTable) -> StepResult:
        """Enqueue the forward and the sampling of a scheduled batch.

        With grammars, enqueue only the forward: `sample` must follow before the next launch.
        """
        if not batch.has_grammars:
            result = super().launch(batch, table)
            assert isinstance(result, StepResult)
            return result
        self.buffers.rotate()
        self.buffers[0].begin()
        self.inputs.update_page_table(table)
        result, logits = StepResult(self.buffers[0]), list[torch.Tensor]()
        with self.stream.enqueuing(), self.buffers[0].packed():
            step = self.prepare(batch)

        @torch.inference_mode()
        def compute() -> None:
            logits.append(self.compute(step))

        @torch.inference_mode()
        def choose(mask: TokenMask) -> None:
            step.metadata.mask = mask
            self.choose(logits.pop(), step, result)

        result.computed = result.buffers.in_use = self.stream.launch(compute)
        result.choose = choose
        return result

    def sample(self, result: StepResult, rows: np.ndarray, bits: np.ndarray) -> None:
        """Enqueue the sampling of a step that was launched without it.

        rows: [n] indices of the sampled requests with a grammar. bits: [n, W] int32.
        """
        choose, buffers = result.choose, result.buffers
        assert choose is not None, "this step has been sampled"
        with self.stream.enqueuing(), buffers.packed():
            mask = TokenMask(*(buffers.upload(torch.from_numpy(part)) for part in (rows, bits)))
        result.choose = None
        result.done = buffers.in_use = self.stream.launch(lambda: choose(mask), is_forward=False)
