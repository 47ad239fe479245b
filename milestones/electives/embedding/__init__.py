"""Elective: requests for vectors beside requests for text, in the same batch.

A pooling request returns the hidden states of its prompt as one vector, and generates nothing.
Chunks, pages, the prefix cache and overlap are those of m5. Engines for both kinds of requests are
from vLLM (pooling models) and SGLang (`is_embedding`).
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
