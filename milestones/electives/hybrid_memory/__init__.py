"""Elective: hybrid memory, for models with layers that do not all see the whole context.

Groups of layers have page tables of their own, and share one pool. A group with a sliding window
gives back the pages behind it. A group with recurrent states has a state for each request. The
prefix cache finds only prefixes that every group can resume from. The groups are from vLLM (hybrid
KV cache manager), the tree from SGLang (SWA and Mamba radix caches).
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
