"""`LLMEngine`: m5's, with a variant of its operations."""

from __future__ import annotations

from dataclasses import replace

from common import EngineConfig, LoadedModel

from .m5_engine import EngineCore
from .m5_engine import LLMEngine as M5LLMEngine
from .variants import EXACT, find_variant

__all__ = ["EngineCore", "LLMEngine"]


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        *,
        variant: str = "exact",
    ) -> None:
        """variant: a name in `VARIANTS`. All but `exact` set `readable`.

        So the model runs Hugging Face's own lines, because a variant can replace these operations.
        """
        self.variant = find_variant(variant)
        config = config or EngineConfig()
        if self.variant is not EXACT:
            config = replace(config, readable=True)
        super().__init__(config, loaded)

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        return EngineCore(self.config, ModelRunner(self.loaded.model, self.config, self.variant))
