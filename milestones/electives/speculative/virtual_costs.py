"""What drafting takes in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.clock import VirtualClock
from common.virtual_time import wrap

from .engine import LLMEngine

LOOKUP_MS = 0.02  # of the host: to look up the newest tokens of one request


def add_costs(engine: LLMEngine, clock: VirtualClock) -> str:
    """Charge the drafter. Return what it takes, in words.

    The host waits for the forwards of a draft model. They are faster than those of the model, as
    the draft model has fewer parameters. A drafter without a model only looks tokens up.
    """
    model = getattr(engine.drafter, "model", None)
    share = 0.0 if model is None else num_parameters(model) / num_parameters(engine.loaded.model)

    def propose(original: Callable[..., list[int]], *args: Any) -> list[int]:
        if model is None:
            clock.charge(LOOKUP_MS / 1000)
            return original(*args)
        with clock.computing(model, share=share):
            return original(*args)

    wrap(engine.drafter, "propose", propose)
    if model is None:
        return f", a lookup of drafts {LOOKUP_MS:g} ms"
    return f", a forward of the draft model {share:.0%} of that"


def num_parameters(model: Any) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
