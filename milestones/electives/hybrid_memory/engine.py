"""`LLMEngine`: its scheduler knows the groups of layers that the model has."""

from __future__ import annotations

from .m5_engine import EngineCore
from .m5_engine import LLMEngine as M5LLMEngine
from .scheduler import Scheduler

__all__ = ["EngineCore", "LLMEngine"]


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time, on the pages of all groups."""

    def make_core(self) -> EngineCore:
        core = super().make_core()
        pool, states = core.runner.kv_pool, core.runner.states
        core.scheduler = Scheduler(self.config, pool.num_pages, [*pool.groups, *states.groups])
        return core
