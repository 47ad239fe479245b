"""Elective: speculative decoding, which computes several tokens of a request in one step.

A drafter guesses the next tokens of a request. One forward computes all of them, and the sampler
draws the model's own token at each position. A draft is accepted if it is equal to that token, so
speculation changes the number of steps and no token. The idea is from Leviathan et al. and Chen et
al. (2023), prompt lookup from Saxena (2023).
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
