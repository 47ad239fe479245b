"""`EngineCore`: the loop of m5, in which vectors join their requests after the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from common import PoolingParams, PoolingRequestOutput, Prompt, SamplingParams
from common.engine_core import EngineCoreOutput

from .m5_engine import EngineCore as M5EngineCore
from .m5_engine import LLMEngine as M5LLMEngine
from .pooling import accumulate, finish_pooling
from .pooling_input import PoolingInputProcessor
from .schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from .model_runner import StepResult


class EngineCore(M5EngineCore):
    """Ends pooling requests with their prompts."""

    def step(self) -> list[EngineCoreOutput]:
        """Return the tokens and vectors of one step. The next forward is already queued.

        If a forward fails, all steps in flight are undone, and the requests are as before them.
        """
        if not self.result_queue:
            self.launch()  # first step: no forward is running, so there is nothing to overlap with
        if not self.result_queue:
            return []
        batch, result = self.result_queue[0]
        self.scheduler.in_flight.advance(batch)
        if self.enable_overlap and not self.scheduler.needs_result():
            self.launch()
        sampled = self.wait(batch, result)
        self.result_queue.popleft()
        outputs = self.scheduler.update_from_output(batch, sampled)
        outputs += self.update_pooled(batch, result)
        self.undo_useless_step()
        return outputs

    def update_pooled(self, batch: ScheduleBatch, result: StepResult) -> list[EngineCoreOutput]:
        """Add the sums of a computed step to their requests. End those that are complete.

        A request that has finished since the launch was aborted.
        """
        outputs = []
        rows = zip(batch.pooled_indices, batch.pooled_requests, result.pooled, strict=True)
        for i, request, row in rows:
            if request.is_finished:
                continue
            start = request.num_computed_tokens - batch.num_scheduled_tokens[i]
            accumulate(request, row, start)
            if request.num_uncomputed_tokens == 0:  # the lesson: it ends with its prompt
                outputs.append(output := finish_pooling(request))
                self.scheduler.finish_request(request, output.finish_reason or "stop")
        return outputs


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time: for text, or for vectors."""

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        runner = ModelRunner(self.loaded.model, self.config)
        self.input_processor = PoolingInputProcessor(  # accepts pooling requests
            self.loaded, self.config, self.output_processor.is_in_use, self.now, runner.hidden_size
        )
        return EngineCore(self.config, runner)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        with self.guard("add_request") as call:
            return call.keep(self.add(prompt, params, request_id))  # type: ignore[arg-type]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return a vector for each prompt, in prompt order: `outputs.data` of each output.

        The arguments are those of `generate`.
        """
        with self.guard("embed"):
            return self.run_batch(
                prompts, "pooling_params", pooling_params, PoolingParams, progress
            )
