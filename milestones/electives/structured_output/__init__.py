"""Elective: structured output, in which a grammar allows or excludes each token of an output.

A JSON schema, a regular expression or a list of choices is compiled in the background. In each
step, a bitmask says which tokens the grammar allows next. The mask of step N+1 depends on the token
of step N. Therefore the forward of N+1 is queued at once, as in m5, and its sampling is queued when
the mask is known. The method of masks is from Willard and Louf (2023).
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
