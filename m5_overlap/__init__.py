"""Milestone 5: overlap scheduling, so that the scheduler does not make the model wait.

While the device computes step N on its own stream, the host plans and launches step N+1, whose
input tokens are placeholders. Only then does it process the result of step N. The overlap scheduler
is from SGLang (v0.4, 2024), after NanoFlow. CUDA graphs for decode and pinned buffers in turns are
common to all fast engines.
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
