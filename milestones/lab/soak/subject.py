"""The tested engine: its configuration by a plan, and the requests that it must admit."""

from __future__ import annotations

from typing import Any

from common import EngineConfig, LoadedModel

from ...chain import load
from ..instruments.audit import audited_engine_class
from ..instruments.forced_retractions import force_retractions
from .drafter import PlannedDrafter
from .plan import Plan, PlannedRequest

WHOLE_PROMPTS = "m2_continuous"  # computes a prompt in one step: its budget must hold most prompts
LEAST_BUDGET = 24


def build_engine(milestone: str, mode: str, plan: Plan, loaded: LoadedModel) -> Any:
    """Return an audited engine of a milestone, as the plan configures it."""
    config = dict(plan.config)
    if milestone == WHOLE_PROMPTS:
        config["max_num_batched_tokens"] = max(LEAST_BUDGET, config["max_num_batched_tokens"])
    engine: Any = audited_engine_class(milestone, mode)(
        EngineConfig(model=loaded.name, device="cpu", enable_overlap=mode != "serial", **config),
        loaded,
        *_drafters(milestone, plan),
    )
    if hasattr(engine.core.scheduler, "retract"):
        force_retractions(engine.core.scheduler, plan.retract_every)
    return engine


def _drafters(milestone: str, plan: Plan) -> list[PlannedDrafter]:
    """Return the last argument of an engine with drafts, and nothing for all others."""
    if milestone != "speculative":
        return []
    return [PlannedDrafter(plan, load(milestone, "drafter").NGramDrafter())]


class Limits:
    """The limits of an engine, computed from its configuration and its pool."""

    def __init__(self, milestone: str, engine: Any) -> None:
        stats, config = engine.stats(), engine.config
        self.max_model_len: int = config.max_model_len
        has_pages = stats.kv_pages_total > 0
        self.pool_tokens = engine.core.scheduler.kv_cache.max_tokens if has_pages else None
        self.prompt_tokens: int = config.max_model_len - 1
        if milestone == WHOLE_PROMPTS:
            self.prompt_tokens = min(self.prompt_tokens, config.max_num_batched_tokens)
        if self.pool_tokens is not None:
            self.prompt_tokens = min(self.prompt_tokens, self.pool_tokens)

    def admits(self, request: PlannedRequest) -> bool:
        """Return whether the engine must admit a request, rather than refuse it by `ValueError`."""
        return len(request.prompt) <= self.prompt_tokens

    def most_tokens(self, request: PlannedRequest) -> int:
        """Return how many tokens a request may have, in prompt and output."""
        limits = [len(request.prompt) + request.params.max_tokens, self.max_model_len]
        if self.pool_tokens is not None:
            limits.append(self.pool_tokens + 1)
        return min(limits)
