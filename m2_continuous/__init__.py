"""Milestone 2: continuous batching. The batch is chosen again for every forward of the model.

Requests join and leave between any two tokens, so a short request never waits for the longest one
of its batch. One forward computes a token of every running request: for sixteen requests, the
weights are read once instead of sixteen times. Iteration-level scheduling is from Orca (Yu et al.,
OSDI 2022).
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
