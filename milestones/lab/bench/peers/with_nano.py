"""nano-vllm, on the weights in a folder."""

from __future__ import annotations

from .serve import MAX_MODEL_LEN, Serve, serve_at_once


def start(model: str, _folder: str, float32: bool) -> Serve:
    """Start nano-vllm on the weights in a folder."""
    from nanovllm import LLM, SamplingParams

    return serve_at_once(
        LLM(model, enforce_eager=False, max_model_len=MAX_MODEL_LEN).generate, SamplingParams
    )
