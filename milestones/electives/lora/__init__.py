"""Elective: many LoRA adapters over one model, together in one batch.

A request may name an adapter: small matrices that change the linear layers of the model. The rows
of a step belong to different adapters, and they share the products with the weights of the model.
The idea is from Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023).
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
