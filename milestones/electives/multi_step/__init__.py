"""Elective: multi-step scheduling, which plans several steps at once and looks at results later.

The host plans up to eight decode steps at a time and queues their forwards. It plans again when the
last one has been processed, so it costs a gap once in eight steps. In return, a step computes
tokens for requests that have ended, and a new request waits until the plan ends. vLLM scheduled
like this (`num_scheduler_steps`, version 0.6, 2024) before its V1 engine.
"""

from typing import TYPE_CHECKING

from common.lazy import lazy_exports

from .. import path_below

__path__.append(path_below(__name__))

if TYPE_CHECKING:
    from .engine import LLMEngine
else:  # when it is first used: a scheduler needs no model
    __getattr__ = lazy_exports(__name__, {"LLMEngine": ".engine"})

__all__ = ["LLMEngine"]
