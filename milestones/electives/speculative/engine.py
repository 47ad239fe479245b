"""`LLMEngine`: the drafter is an argument."""

from __future__ import annotations

from common import EngineConfig, LoadedModel

from .drafter import Drafter, NGramDrafter
from .m5_engine import EngineCore
from .m5_engine import LLMEngine as M5LLMEngine

__all__ = ["EngineCore", "LLMEngine"]


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time. A step may add several tokens."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """drafter: guesses tokens; None: prompt lookup."""
        self.drafter = drafter or NGramDrafter()
        super().__init__(config, loaded)

    def make_core(self) -> EngineCore:
        core = super().make_core()
        core.scheduler.drafting.drafter = self.drafter
        return core
