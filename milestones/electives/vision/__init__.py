"""Elective: images in prompts.

A vision encoder turns an image into embeddings, one for each of its tokens. They take the places of
placeholders in the prompt. Equal images share pages of the KV cache, and are encoded once as long
as the encoder cache has room. The models are Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL.
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
