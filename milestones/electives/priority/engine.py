"""`EngineCore`: pages are copied to the host and back while the steps run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from common import EngineConfig, Prompt, SamplingParams
from common.engine_core import ForwardError, SampledToken
from common.validation import LARGEST_INT, require_int

from .m5_engine import EngineCore as M5EngineCore
from .m5_engine import LLMEngine as M5LLMEngine
from .schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from .model_runner import ModelRunner, StepResult


class EngineCore(M5EngineCore):
    """Starts the copies, and measures what copies and tokens cost."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        super().__init__(config, runner)
        cache = self.scheduler.kv_cache.radix_cache
        cache.resize_host(runner.host_pool.num_pages)
        self.costs = cache.costs
        self.costs.page_seconds = runner.host_pool.measure()

    def launch(self) -> None:
        batch = self.scheduler.schedule()
        # The copies start before this step can write to their pages, even if it is empty.
        with self.undoing_failures(batch):
            self.runner.copy_pages(self.scheduler.kv_cache.radix_cache.take_transfers())
        if batch.requests:
            with self.undoing_failures(batch):
                result = self.runner.launch(batch, self.scheduler.kv_cache.table)
            self.result_queue.append((batch, result))

    def wait(self, batch: ScheduleBatch, result: StepResult) -> list[SampledToken]:
        sampled = super().wait(batch, result)
        if self.runner.stream.spans and not batch.is_decode:
            self.costs.observe(batch.num_tokens, *self.runner.stream.spans[-1])
        return sampled

    @contextmanager
    def undoing_failures(self, batch: ScheduleBatch) -> Iterator[None]:
        """If a part of a forward or a copy fails, undo all steps in flight.

        After a failed copy, all pages and copies are dropped, and no request ends.
        """
        try:
            with super().undoing_failures(batch):
                yield
        except ForwardError as failure:
            if self.runner.end_copies():  # any page may be one that was not written
                self.send_back()
                self.reset_prefix_cache()
                failure.requests = []  # no request is the cause
            raise


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time, the most urgent ones first."""

    core: EngineCore

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        return EngineCore(self.config, ModelRunner(self.loaded.model, self.config))

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request. priority: a lower value is more urgent."""
        with self.guard("add_request") as call:
            require_int("priority", priority, low=-LARGEST_INT - 1)
            return call.keep(self.add(prompt, params, request_id, priority=priority))
