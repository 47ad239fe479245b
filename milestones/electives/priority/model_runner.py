"""`ModelRunner`: copies pages to the host and back, beside the step in flight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common import EngineConfig

from .hi_radix_cache import Transfer
from .host_pool import HostPool, wait_in_stream
from .kv_cache import PageTable
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step as M5Step
from .m5_model_runner import StepResult
from .schedule_batch import ScheduleBatch
from .stream import Event, open_stream

__all__ = ["ModelRunner", "Step", "StepResult"]


@dataclass
class Step(M5Step):
    """What the host has prepared for a step, and the copies that the step waits for.

    Copies that are started after its launch are not among them: they wait for this step.
    """

    copied: Event | None


class ModelRunner(M5ModelRunner):
    """Runs a Hugging Face model, and copies on a stream of their own."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.host_pool = HostPool(self.kv_pool)
        self.copy_stream = open_stream(model.device, 0.0)
        self.copy_stream.wait_before_freeing(self)
        self.copied: Event | None = None  # set after all copies that were started
        self.is_copying = False  # a copy that fails leaves it True
        self.computed: Event | None = None  # set after all steps that were launched

    def launch(self, batch: ScheduleBatch, table: PageTable) -> StepResult:
        result = super().launch(batch, table)
        self.computed = result.done
        return result

    def prepare(self, batch: ScheduleBatch) -> Step:
        return Step(**vars(super().prepare(batch)), copied=self.copied)

    def compute(self, step: M5Step) -> torch.Tensor:
        assert isinstance(step, Step)
        wait_in_stream(step.copied)
        return super().compute(step)

    def copy_pages(self, transfers: list[Transfer]) -> None:
        """Start to copy pages beside the step in flight. The steps launched later wait for it.

        Pages of the device are written only after that step, which may still read a freed page.
        """
        computed = self.computed

        def work() -> None:
            self.is_copying = True
            self.host_pool.copy(transfers, lambda: wait_in_stream(computed, False))
            self.is_copying = False

        if transfers:
            self.copied = self.copy_stream.launch(work)

    def end_copies(self) -> bool:
        """Wait for all copies, and clear their failures. Return whether one has failed."""
        self.copy_stream.synchronize()
        has_failed, self.is_copying, self.copied = self.is_copying, False, None
        return has_failed

    def close(self) -> None:
        self.copy_stream.close()  # its copies use the memory of the pool
        super().close()
        self.host_pool.pages = torch.empty(0)
