"""Elective: conversations that pause, such as those of agents that wait for their tools.

An agent calls, waits for a tool, and calls again with the same prefix. Hints say how long a pause
will be. The prefix cache keeps what returns soonest, and host memory keeps the rest. The request
field `agent_hint` is from vLLM's RFC 52113, references of sessions from SGLang's radix cache.
"""

from typing import TYPE_CHECKING

from common.lazy import lazy_exports

from .. import paths_below

__path__ += paths_below(__name__)

if TYPE_CHECKING:
    from .engine import LLMEngine
else:  # when it is first used: a scheduler needs no model
    __getattr__ = lazy_exports(__name__, {"LLMEngine": ".engine"})

__all__ = ["LLMEngine"]
