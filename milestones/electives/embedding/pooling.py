"""From hidden states to one vector for each pooling request.

    device   a forward computes hidden states [T, H] of the tokens of all requests
             pool             sum the states of each pooling request: one row [H] for each
    host     accumulate       MEAN: add the row to the sum of the earlier chunks
             embedding        after the last chunk: divide, cut, normalize

Only sums are copied to the host, in the same way as sampled tokens. The host adds a row when the
step has been computed, so a step that is undone adds nothing. All arithmetic is in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sums

import torch

from common.engine_core import EngineCoreOutput

from .pooling_request import PoolingRequest
from .schedule_batch import ScheduleBatch

SHORTEST = 1e-12  # a shorter vector is divided by this number: zeros stay zeros


def pooled_tokens(batch: ScheduleBatch) -> list[slice]:
    """Return the tokens that each pooling request takes from a step, as slices of the flat batch.

    MEAN takes all tokens of the chunk. LAST takes the last one.
    """
    ends = list(running_sums(batch.num_scheduled_tokens))
    tokens = []
    for i, request in zip(batch.pooled_indices, batch.pooled_requests, strict=True):
        count = batch.num_scheduled_tokens[i] if request.needs_all_tokens else 1
        tokens.append(slice(ends[i] - count, ends[i]))
    return tokens


def pool(states: torch.Tensor, tokens: Sequence[slice]) -> torch.Tensor:
    """Return the sum of the states of each slice: [P, H] float32.

    states: [T, H], of any floating-point type. Each sum is an operation of its own, so it does not
    depend on the other requests of the step (I2).
    """
    return torch.stack([states[part].float().sum(dim=0) for part in tokens])


def accumulate(request: PoolingRequest, row: torch.Tensor, start: int) -> None:
    """Add the row of a computed step to the sum of its request. row: [H] float32, on the host.

    start: the position of the chunk's first token. At 0, the sum begins again: the request is new,
    or it was retracted.
    """
    if request.needs_all_tokens and start > 0:
        assert request.partial_sum is not None, f"I1: {request} has lost its sum"
        row = request.partial_sum + row
    request.partial_sum = row


def embedding(request: PoolingRequest) -> torch.Tensor:
    """Return the vector of a request after its last chunk, [H] or [dimensions] float32.

    It is cut before it is normalized, so that it has unit length in the end.
    """
    params, vector = request.pooling_params, request.partial_sum
    assert vector is not None, f"I1: {request} has no hidden state"
    if request.needs_all_tokens:
        vector = vector / request.num_prompt_tokens
    vector = vector[: params.dimensions]
    return vector / vector.norm().clamp(min=SHORTEST) if params.normalize else vector


def finish_pooling(request: PoolingRequest) -> EngineCoreOutput:
    """Return how a request ends after its last chunk. Its vector is in the request."""
    data = embedding(request)
    if not data.isfinite().all():
        error = "the model's hidden states are not finite"
        return EngineCoreOutput(request, finish_reason="error", error=error)
    request.data = data
    return EngineCoreOutput(request, finish_reason="stop")
