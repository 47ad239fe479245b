"""Milestone 5: overlap scheduling, so that the scheduler never makes the model wait.

While step N is being computed on a stream of its own, the host plans and launches step N+1, whose
input tokens are placeholders, and only then processes N's result. The overlap scheduler is SGLang's
(v0.4, 2024), after NanoFlow; CUDA graphs for decode and buffers in turns are everybody's.
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
