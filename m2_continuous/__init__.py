"""Milestone 2: continuous batching. The batch is chosen again for every forward of the model.

Requests join and leave between any two tokens, so a short request never waits for the longest one
of its batch. One forward computes a token of every running request: for sixteen requests, the
weights are read once instead of sixteen times. Iteration-level scheduling is from Orca (Yu et al.,
OSDI 2022).
"""

from typing import TYPE_CHECKING

from common.lazy import lazy_exports

if TYPE_CHECKING:
    from .engine import LLMEngine
else:  # when it is first used: a scheduler needs no model
    __getattr__ = lazy_exports(__name__, {"LLMEngine": ".engine"})

__all__ = ["LLMEngine"]
