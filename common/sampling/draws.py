"""Choose a token from the logits of each row: the most likely one, or a draw.

A draw is a pure function of (logits, seed, position). There is no random generator, because its
state would depend on the other requests in the batch. Instead, a counter-based hash of (seed,
position) gives one uniform number, and the inverse of the cumulative distribution converts it to a
token. The host computes the hash. The rest is a few tensor operations, the same on CPU and GPU.

    logits --/ temperature--> top-k --> top-p --> min-p --> softmax --> cumulative sum
    hash(seed, position) --> u in [0, 1)  -----------------------> first token above u

These operations are the definition. On a GPU they are many launches, so a few kernels of
`draw_kernels.py` compute the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from ..request import Request
from .argmax import argmax
from .filters import Filters, apply_filters

BLOCK = 1024  # tokens that `draw` adds up together


@dataclass
class DrawParams:
    """How the rows of a batch draw: tensors of shape [B] on the device of the logits."""

    temperature: torch.Tensor  # float32; 1 in greedy rows
    greedy: torch.Tensor  # bool: such a row draws nothing
    uniforms: torch.Tensor  # float64 in [0, 1): a hash of the seed and the token's position
    filters: Filters | None

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], positions: Sequence[int], device: torch.device | str
    ) -> DrawParams:
        """positions: of the token to draw for each request."""
        seeds = np.array([request.seed for request in requests], np.int64)
        params = [request.params for request in requests]
        filtered = any(p.is_filtered for p in params)
        # Normal float32 numbers. A draw at 1e-37 is already an argmax, one at 1e38 is uniform.
        temperature = [1.0 if p.is_greedy else min(max(p.temperature, 1e-37), 1e38) for p in params]

        def tensor(values: Sequence[float] | np.ndarray, dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype)).to(device)

        return cls(
            temperature=tensor(temperature, np.float32),
            greedy=tensor([p.is_greedy for p in params], np.bool_),
            uniforms=tensor(uniform(seeds, np.array(positions, np.int64)), np.float64),
            filters=Filters.from_requests(requests, device) if filtered else None,
        )


def choose_in_torch(logits: torch.Tensor, draws: DrawParams) -> tuple[torch.Tensor, torch.Tensor]:
    """See `choose` in `choice.py`."""
    token_ids, is_valid = most_likely(logits)
    drawn = draw(scale_and_filter(logits, draws), draws.uniforms)
    return torch.where(draws.greedy | ~is_valid, token_ids, drawn), is_valid


def most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely token of each row, and whether its logit is a finite number: [B]."""
    token_ids = argmax(logits)  # in a row with NaN, the index of a NaN
    return token_ids, logits.gather(-1, token_ids[:, None]).squeeze(-1).isfinite()


def scale_and_filter(logits: torch.Tensor, draws: DrawParams) -> torch.Tensor:
    """Divide logits by the temperature, and filter them.

    Returns [B, V] float32. The largest of a row is 0; tokens that are filtered out are -inf.
    """
    logits = logits.float()
    # Shift the largest to 0 first: dividing by a tiny temperature can then not overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / draws.temperature[:, None]
    if (filters := draws.filters) is not None:
        logits = apply_filters(logits, filters)
    return logits


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token for each row from softmax(logits) by inverting the cumulative distribution.

    logits: [B, V] float32, largest 0. uniforms: [B] float64 in [0, 1). Returns [B] int64.
    The sums of blocks say in which block the token is, and only this block gets a cumulative sum. A
    GPU adds up all blocks at the same time, but the parts of one long cumulative sum in turn.
    A token with probability zero is never drawn, because it adds nothing to a sum.
    """
    num_rows, num_tokens = logits.shape
    weights = logits.new_zeros(num_rows, -(-num_tokens // BLOCK) * BLOCK, dtype=torch.float64)
    weights[:, :num_tokens] = logits.exp()
    weights = weights.view(num_rows, -1, BLOCK)
    sums = weights.sum(dim=-1)  # [B, blocks]
    before = pad(sums[:, :-1].cumsum(dim=-1), (1, 0))  # [B, blocks]: the sum of all blocks before
    threshold = uniforms[:, None] * (before + sums)[:, -1:]  # [B, 1]
    block = torch.searchsorted(before, threshold, right=True) - 1  # [B, 1]
    cumulative = weights.take_along_dim(block[:, :, None], 1).squeeze(1).cumsum(dim=-1)
    # Both sums of a block are rounded, so what is left may be the whole cumulative sum or more.
    rest = (threshold - before.gather(-1, block)).minimum(cumulative[:, -1:] * (1 - 2**-53))
    return (block * BLOCK + torch.searchsorted(cumulative, rest, right=True)).squeeze(-1)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a float64 in [0, 1) for each (seed, position): 48 bits of a hash (splitmix64).

    seeds, positions: [B] int64. The host knows both. A GPU would need thirty launches for this.
    """
    bits = _mix(_mix(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return np.asarray((bits >> np.uint64(16) & np.uint64(2**48 - 1)) / 2.0**48)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 to uint64 numbers, which wrap around.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
