"""`LLMEngine`: a request may name an adapter, and adapters come and go while the engine runs."""

from __future__ import annotations

from common import LoRARequest, Prompt, SamplingParams

from .adapters import AdapterRegistry
from .m5_engine import EngineCore
from .m5_engine import LLMEngine as M5LLMEngine

__all__ = ["EngineCore", "LLMEngine"]


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time, each with its adapter."""

    def make_core(self) -> EngineCore:
        core = super().make_core()
        lora = core.runner.lora
        self.adapters = AdapterRegistry(lora.shapes, self.config.max_lora_rank, lora.stage)
        return core

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a request. lora_request: its adapter, which is loaded if its name is new."""
        with self.guard("add_request") as call:
            adapter = self.adapters.find(lora_request)
            return call.keep(self.add(prompt, params, request_id, adapter=adapter))

    def add_lora(self, lora_request: LoRARequest) -> int:
        """Load an adapter, even if its name is known: later requests use the new version.

        Returns the number of the load. Raises `ValueError` if the files cannot be used.
        """
        with self.guard("add_lora"):
            return self.adapters.load(lora_request).number

    def remove_lora(self, lora_name: str) -> bool:
        """Forget an adapter. Live requests keep it. Returns whether the name was loaded."""
        with self.guard("remove_lora"):
            return self.adapters.remove(lora_name)

    def list_loras(self) -> list[str]:
        """Return the names of the loaded adapters."""
        with self.guard("list_loras"):
            return list(self.adapters.adapters)
