"""Elective: prefill and decode apart, each on an engine of its own.

One side computes prompts, and sends their pages layer by layer. The other side computes one token
of each request in every step, and no prompt makes it wait. The queues have SGLang's names, leases
that are renewed by heartbeats are from vLLM's NIXL connector. The split is from DistServe (Zhong et
al., OSDI 2024) and Splitwise (Patel et al., ISCA 2024).
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
