"""Elective: one answer, and why other engines have many.

The engine can compute the operations of the model with sums in orders that depend on the batch, as
fast kernels do. A recording of two runs shows the first operation that differs, and each operation
has a repair: an order that never changes. The subject is from "Defeating Nondeterminism in LLM
Inference" (Thinking Machines, 2025); vLLM and SGLang call the property batch invariance.
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
