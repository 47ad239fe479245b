"""Milestone 4: a radix tree over the KV pages, so that no prefix is computed twice.

A request begins with the cached pages of its longest known prefix. When it finishes, the pages that
it has computed stay cached. RadixAttention, the cache-aware policies and in-batch prefix sharing
are from SGLang (Zheng et al., NeurIPS 2024).
"""

from typing import TYPE_CHECKING

from common.lazy import lazy_exports

if TYPE_CHECKING:
    from .engine import LLMEngine
else:  # when it is first used: a scheduler needs no model
    __getattr__ = lazy_exports(__name__, {"LLMEngine": ".engine"})

__all__ = ["LLMEngine"]
