"""Milestone 4: a radix tree over the KV pages, so that no prefix is computed twice.

A request begins with the cached pages of its longest known prefix. When it finishes, the pages that
it has computed stay cached. RadixAttention, the cache-aware policies and in-batch prefix sharing
are from SGLang (Zheng et al., NeurIPS 2024).
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
