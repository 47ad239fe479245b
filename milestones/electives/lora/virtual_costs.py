"""What adapters take in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.clock import VirtualClock
from common.virtual_time import wrap

from .adapters import Load
from .engine import LLMEngine
from .model_runner import Step

FORWARD_MS = 0.5  # more for a forward with adapters: two small products in each linear layer
GIGABYTES_PER_SECOND = 16.0  # of the link between the host's memory and the device's


def add_costs(engine: LLMEngine, clock: VirtualClock) -> str:
    """Charge the products of adapters, and their copies to the slots. Return both in words."""
    runner = engine.core.runner

    def compute(original: Callable[..., Any], step: Step) -> Any:
        if step.inputs.lora is not None:
            clock.charge(FORWARD_MS / 1000)
        return original(step)

    def write(original: Callable[..., None], load: Load) -> None:
        original(load)
        clock.charge(num_bytes(load) / GIGABYTES_PER_SECOND / 1e9)

    wrap(runner, "compute", compute)
    wrap(runner.lora, "write", write)
    return f", {FORWARD_MS:g} ms more with adapters, loads at {GIGABYTES_PER_SECOND:g} GB/s"


def num_bytes(load: Load) -> int:
    """Return the bytes of the matrices of an adapter."""
    matrices = [m for weights in load.adapter.weights.values() for m in (weights.a, weights.b)]
    return sum(matrix.numel() * matrix.itemsize for matrix in matrices)
