"""Milestone 5: overlap scheduling, so that the scheduler does not make the model wait.

While the device computes step N on its own stream, the host plans and launches step N+1. The input
tokens of step N+1 are placeholders. Only then does the host process the result of step N. The
overlap scheduler is from SGLang (v0.4, 2024), after NanoFlow. CUDA graphs for decode and pinned
buffers in turns are common to all fast engines.
"""

from typing import TYPE_CHECKING

from common.lazy import lazy_exports

if TYPE_CHECKING:
    from .engine import LLMEngine
else:  # when it is first used: a scheduler needs no model
    __getattr__ = lazy_exports(__name__, {"LLMEngine": ".engine"})

__all__ = ["LLMEngine"]
