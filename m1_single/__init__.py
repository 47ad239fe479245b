"""Milestone 1: one request at a time, and a KV cache so that no token is computed twice.

The model keeps the keys and values of every token it has seen (`past_key_values`), so a step feeds
only what is new: the whole prompt once, then one token. Cost per token falls from O(n) to O(1)
tokens computed, for a whole answer from O(n^2) to O(n).
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
