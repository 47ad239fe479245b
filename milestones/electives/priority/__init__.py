"""Elective: priorities, preemption, and a KV cache that continues in host memory.

A waiting request preempts running ones that are less urgent. Pages that the prefix cache evicts are
copied to host memory, where a later request finds them. Preemption by swap and recomputation is
from vLLM (Kwon et al., SOSP 2023), the hierarchical cache from SGLang (HiCache).
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
