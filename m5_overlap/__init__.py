"""Milestone 5: overlap scheduling, so that the scheduler does not make the model wait.

While the device computes step N on its own stream, the host plans and launches step N+1. The input
tokens of step N+1 are placeholders. Only then does the host process the result of step N. The
overlap scheduler is from SGLang (v0.4, 2024), after NanoFlow. CUDA graphs for decode and pinned
buffers in turns are common to all fast engines.
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
