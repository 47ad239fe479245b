"""Milestone 4: a radix tree over the KV pages, so that no prefix is computed twice.

A request begins with the pages of the longest prefix that others have computed; what it computes
stays cached when it ends. RadixAttention, the cache-aware policies and in-batch prefix sharing are
from SGLang (Zheng et al., NeurIPS 2024).
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
