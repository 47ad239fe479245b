"""Milestone 3: KV memory in pages, attention through a page table.

A request holds as many pages as its tokens need and no more, so memory holds many times as many
requests; and a step is one flat list of tokens, decodes and chunks of prompts, without padding.
PagedAttention is from vLLM (Kwon et al., SOSP 2023), chunked prefill from Sarathi (Agrawal et al.,
OSDI 2024), admission and retraction from SGLang.
"""

from .engine import LLMEngine

__all__ = ["LLMEngine"]
