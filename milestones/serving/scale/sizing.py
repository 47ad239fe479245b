"""How many replicas some users need, on paper: from a step model and a hit rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .steps import StepModel

UTILIZATION = 0.6  # of a replica: the rest is for bursts, and for the requests of a dead replica
SECONDS_PER_REQUEST = 60.0  # of one active user
PROMPT_TOKENS, OUTPUT_TOKENS = 960, 128  # the means of `Traffic`
RUNNING = 16  # requests that decode together
GPU = "an H200 with a model of 8 billion weights in bfloat16, by arithmetic"


@dataclass(frozen=True)
class Sizing:
    """What one replica can do, at a hit rate."""

    hit_rate: float
    seconds: float  # of a replica for each request

    @property
    def users(self) -> float:
        """Return the users of one replica."""
        return UTILIZATION * SECONDS_PER_REQUEST / self.seconds

    def replicas(self, users: int) -> int:
        """Return the replicas that so many users need."""
        return math.ceil(users / self.users)


def sizing(steps: StepModel, hit_rate: float, running: int = RUNNING) -> Sizing:
    """Return the sizing at a hit rate, with `running` requests that decode together."""
    prefill = steps.prefill_seconds((1 - hit_rate) * PROMPT_TOKENS)
    return Sizing(hit_rate, prefill + OUTPUT_TOKENS * steps.decode_seconds(running) / running)


def gpu_steps(
    bytes_per_second: float = 4.3e12,
    flops_per_second: float = 0.5 * 790e12,
    num_weights: float = 8e9,
    kv_bytes: float = 131_072,
    context: float = PROMPT_TOKENS + OUTPUT_TOKENS / 2,
) -> StepModel:
    """Return a step model by arithmetic. It is a lower bound of the time, and no measurement.

    A decode step reads all weights and the keys and values of all requests; a prefill multiplies
    each weight once for each token, at half of the machine's best speed. kv_bytes: of one token in
    all layers (32 layers, 8 KV heads of 128, keys and values, 2 bytes).
    """
    weights = 2 * num_weights / bytes_per_second
    decode = [(n, weights + n * context * kv_bytes / bytes_per_second) for n in (1, 16, 64, 256)]
    prefill = [(1, weights)]
    prefill += [(n, max(weights, 2 * num_weights * n / flops_per_second)) for n in (64, 256, 2048)]
    return StepModel(GPU, decode, prefill)


def all_reduce_bytes(hidden: int, ranks: int, itemsize: int = 2) -> float:
    """Return the bytes that one rank sends for one token in one layer of tensor parallelism.

    A layer has two all-reduces of the hidden state, after attention and after the MLP. A ring sends
    2 (n - 1) / n times the size.
    """
    return 2 * 2 * (ranks - 1) / ranks * hidden * itemsize
