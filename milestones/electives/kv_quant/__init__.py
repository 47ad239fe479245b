"""Elective: the KV cache in 8 bits, so that the same memory holds more tokens.

A page holds one int8, one float of 8 bits (fp8), or 4 bits (int4) for each number, and a scale for
each token and head. Keys and values are packed when they are written, and every query reads packed
lines, also those of its own token. So the position of a token alone decides what other tokens read
of it. Scales per token and head are those of vLLM's `int8_per_token_head`.
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
