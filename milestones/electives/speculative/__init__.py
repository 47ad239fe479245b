"""Elective: speculative decoding, which computes several tokens of a request in one step.

A drafter guesses the next tokens of a request. One forward computes all of them, and the sampler
draws the model's own token at each position. A draft is accepted if it is equal to that token, so
speculation changes the number of steps and no token. The idea is from Leviathan et al. and Chen et
al. (2023), prompt lookup from Saxena (2023).
"""

from .. import path_below

__path__.append(path_below(__name__))

from .engine import LLMEngine  # noqa: E402

__all__ = ["LLMEngine"]
