"""Milestone 2: continuous batching. The batch is decided anew for every forward of the model.

Requests join and leave between any two tokens, so nobody waits for the longest of a batch, and one
forward moves all of them: the weights are read once for sixteen tokens instead of once for each.
Iteration-level scheduling is from Orca (Yu et al., OSDI 2022).
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
