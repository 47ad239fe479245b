"""`LLMEngine`: a prompt may have images."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common import EngineStats, Prompt, SamplingParams

from .m5_engine import EngineCore as M5EngineCore
from .m5_engine import LLMEngine as M5LLMEngine

if TYPE_CHECKING:
    from .image_input import ImageInputProcessor


class EngineCore(M5EngineCore):
    """Owns the scheduler and the model runner. It counts the images that were encoded."""

    def stats(self) -> EngineStats:
        return replace(super().stats(), num_encoded_images=self.runner.encoder.num_encoded)


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time, with the images of their prompts."""

    input_processor: ImageInputProcessor

    def make_core(self) -> EngineCore:
        from .image_input import ImageInputProcessor  # not above: a core needs no model
        from .model_runner import ModelRunner

        self.input_processor = ImageInputProcessor(  # expands placeholders
            self.loaded, self.config, self.output_processor.is_in_use, self.now
        )
        return EngineCore(self.config, ModelRunner(self.loaded.model, self.config))

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request. Its prompt may be `{"prompt": ..., "multi_modal_data": {...}}`."""
        with self.guard("add_request") as call:
            found = self.input_processor.with_images(prompt)
            return call.keep(self.add(found, params, request_id, images=found.images))
