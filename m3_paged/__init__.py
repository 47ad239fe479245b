"""Milestone 3: KV memory in pages, and attention through a page table.

A request holds only the pages that its tokens need, so the same memory holds many more requests. A
step is one flat list of tokens without padding: decodes, and chunks of prompts. PagedAttention is
from vLLM (Kwon et al., SOSP 2023), chunked prefill from Sarathi (Agrawal et al., OSDI 2024),
admission and retraction from SGLang.
"""

from typing import TYPE_CHECKING

from common.lazy import lazy_exports

if TYPE_CHECKING:
    from .engine import LLMEngine
else:  # when it is first used: a scheduler needs no model
    __getattr__ = lazy_exports(__name__, {"LLMEngine": ".engine"})

__all__ = ["LLMEngine"]
