"""Milestone 1: one request at a time, and a KV cache so that no token is computed twice.

The model keeps the keys and values of every token that it has computed (`past_key_values`). A step
therefore computes only new tokens: first the whole prompt, then one token per step. The tokens
computed for each output token fall from O(n) to O(1), and for a whole answer from O(n^2) to O(n).
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
