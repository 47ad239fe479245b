"""`EngineCore`: the loop of m5. While drafts are verified, no step is launched ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common import EngineConfig, EngineStats

from .drafter import Drafter, NGramDrafter
from .m5_engine import EngineCore as M5EngineCore
from .m5_engine import LLMEngine as M5LLMEngine
from .scheduler import Scheduler

if TYPE_CHECKING:
    from common import LoadedModel

    from .model_runner import ModelRunner


class EngineCore(M5EngineCore):
    """Its scheduler has a drafter."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, drafter: Drafter) -> None:
        super().__init__(config, runner)
        self.scheduler = Scheduler(config, runner.kv_pool.num_pages, drafter)

    def stats(self) -> EngineStats:
        return replace(
            super().stats(),
            num_draft_tokens=self.scheduler.drafting.num_draft_tokens,
            num_accepted_tokens=self.scheduler.drafting.num_accepted_tokens,
        )


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time, with drafts."""

    core: EngineCore

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """drafter: guesses tokens; by default prompt lookup."""
        self.drafter = drafter or NGramDrafter()
        super().__init__(config, loaded)

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        runner = ModelRunner(self.loaded.model, self.config)
        return EngineCore(self.config, runner, self.drafter)
