"""mini-sglang, on the weights in a folder."""

from __future__ import annotations

from .serve import Serve, serve_at_once


def start(model: str, _folder: str, float32: bool) -> Serve:
    """Start mini-sglang on the weights in a folder."""
    from minisgl.core import SamplingParams
    from minisgl.llm import LLM

    return serve_at_once(LLM(model).generate, SamplingParams)
