"""What encoding images takes in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.clock import VirtualClock
from common.virtual_time import wrap

from .engine import LLMEngine

ENCODER_MS = 2.0  # for each image: the encoder has as many layers as a language model, or more
TOKEN_MS = 0.2  # for each of its tokens, which are four patches


def add_costs(engine: LLMEngine, clock: VirtualClock) -> str:
    """Charge the vision encoder. Return what it takes, in words."""

    def encode(original: Callable[..., Any], image: Any) -> Any:
        found = original(image)
        clock.charge((ENCODER_MS + TOKEN_MS * image.num_tokens) / 1000)
        return found

    wrap(engine.core.runner.encoder, "encode", encode)
    return f", an image {ENCODER_MS:g} ms + {TOKEN_MS:g} ms a token"
