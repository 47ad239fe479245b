"""`EngineCore`: calls of conversations, with hints about their pauses."""

from __future__ import annotations

from common import AgentHint, FinishReason, Prompt, Request, SamplingParams
from common.validation import LARGEST_INT, require_int, shown

from .priority_engine import EngineCore as PriorityEngineCore
from .priority_engine import LLMEngine as PriorityLLMEngine


class EngineCore(PriorityEngineCore):
    """Tells `Conversations` which calls arrive, and which end without having run."""

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.scheduler.kv_cache.conversations.arrive(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        waits = request.row is None and not request.is_finished
        super().finish(request, reason)
        if waits:
            self.scheduler.kv_cache.conversations.forget(request)


class LLMEngine(PriorityLLMEngine):
    """Runs requests until they finish, one `step` at a time, and knows which will be continued."""

    core: EngineCore

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        core = EngineCore(self.config, ModelRunner(self.loaded.model, self.config))
        core.scheduler.kv_cache.conversations.use_clock(self.now)
        return core

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        agent_hint: AgentHint | None = None,
    ) -> str:
        """Queue a request. agent_hint: its conversation, and how long that will pause after it."""
        with self.guard("add_request") as call:
            require_int("priority", priority, low=-LARGEST_INT - 1)
            if agent_hint is not None and not isinstance(agent_hint, AgentHint):
                raise ValueError(f"agent_hint must be an AgentHint, got {shown(agent_hint)}")
            more = {"priority": priority, "agent_hint": agent_hint}
            return call.keep(self.add(prompt, params, request_id, **more))
