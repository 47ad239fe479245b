"""Elective: hybrid memory, for models with layers that do not all see the whole context.

Groups of layers have page tables of their own, and share one pool. A group with a sliding window
gives back the pages behind it. A group with recurrent states has a state for each request. The
prefix cache finds only prefixes that every group can resume from. The groups are from vLLM (hybrid
KV cache manager), the tree from SGLang (SWA and Mamba radix caches).
"""

from .. import path_below

__path__.append(path_below(__name__))

from .engine import LLMEngine  # noqa: E402

__all__ = ["LLMEngine"]
