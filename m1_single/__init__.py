"""Milestone 1: one request at a time, and a KV cache so that no token is computed twice.

The model keeps the keys and values of every token that it has computed (`past_key_values`). A step
therefore computes only new tokens: first the whole prompt, then one token per step. The tokens
computed for each output token fall from O(n) to O(1), and for a whole answer from O(n^2) to O(n).
"""

from typing import TYPE_CHECKING

from common.lazy import lazy_exports

if TYPE_CHECKING:
    from .engine import LLMEngine
else:  # when it is first used: a scheduler needs no model
    __getattr__ = lazy_exports(__name__, {"LLMEngine": ".engine"})

__all__ = ["LLMEngine"]
