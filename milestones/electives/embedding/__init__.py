"""Elective: requests for vectors beside requests for text, in the same batch.

A pooling request returns the hidden states of its prompt as one vector, and generates nothing.
Chunks, pages, the prefix cache and overlap are those of m5. Engines for both kinds of requests are
from vLLM (pooling models) and SGLang (`is_embedding`).
"""

from .. import path_below

__path__.append(path_below(__name__))

from .engine import LLMEngine  # noqa: E402

__all__ = ["LLMEngine"]
