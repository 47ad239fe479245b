"""Logits to tokens: batched, and for each request as if it were alone (I2).

A draw is a pure function of (logits, seed, position). There is no generator whose state would
depend on who else is in the batch: a counter-based hash of (seed, position) gives one uniform
number, and the inverse of the cumulative distribution turns it into a token. All of it is a few
tensor operations, the same on CPU and GPU.

    logits --/ temperature--> top-k --> top-p --> min-p --> softmax --> cumulative sum
    hash(seed, position) --> u in (0, 1)  ----------------------------> first token above u
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch

from .argmax import argmax
from .request import Request
from .sampling_filters import Filters, apply_filters

Logprobs = dict[int, float]  # token id -> log probability
# A token, or None for a row of logits that is no distribution, and log probabilities if asked for.
SampledToken = tuple[int | None, Logprobs | None]


@dataclass
class SamplerOutput:
    """One token for each row, still on the device.

    token_ids: [B] int64, always in the vocabulary: the next step may begin with them before the
        host has looked at `is_valid`.
    is_valid: [B] bool. False where the logits hold NaN or inf, or nothing but -inf: they are no
        distribution, and the token means nothing.
    logprobs, logprob_ids: [B, 1 + n] float32 and int64, the chosen token first, then the n most
        likely; n is the largest number a row asks for. None where no row asks.
    num_logprobs: what each row asks for.
    """

    token_ids: torch.Tensor
    is_valid: torch.Tensor
    logprobs: torch.Tensor | None
    logprob_ids: torch.Tensor | None
    num_logprobs: list[int | None]

    @classmethod
    def empty(cls) -> SamplerOutput:
        """The result of a step without work."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, none.bool(), None, None, [])

    def rows(self) -> Iterator[SampledToken]:
        """Wait for the device and yield (token id, log probabilities) row by row."""
        rows = zip(self.token_ids.tolist(), self.is_valid.tolist(), strict=True)
        token_ids = [token_id if is_valid else None for token_id, is_valid in rows]
        if self.logprobs is None or self.logprob_ids is None:
            yield from ((token_id, None) for token_id in token_ids)
            return
        columns = zip(token_ids, self.logprob_ids.tolist(), self.logprobs.tolist(), strict=True)
        for (token_id, ids, values), count in zip(columns, self.num_logprobs, strict=True):
            if count is None:
                yield token_id, None
            else:
                yield token_id, dict(zip(ids[: 1 + count], values[: 1 + count], strict=True))


@dataclass
class SamplingMetadata:
    """What the rows of a batch ask for, as tensors of shape [B] on the device of the logits."""

    temperature: torch.Tensor  # float32; 1 in greedy rows
    greedy: torch.Tensor  # bool
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # int64: how many tokens come before the one to draw
    filters: Filters | None
    all_greedy: bool
    num_logprobs: list[int | None]

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], device: torch.device | str
    ) -> SamplingMetadata:
        params = [request.params for request in requests]
        return cls(
            # float32 has no smaller normal number; at 1e-37 a draw is an argmax already.
            temperature=torch.tensor(
                [1.0 if p.is_greedy else max(p.temperature, 1e-37) for p in params],
                dtype=torch.float32,
                device=device,
            ),
            greedy=torch.tensor([p.is_greedy for p in params], device=device),
            seeds=torch.tensor([r.seed for r in requests], device=device),
            positions=torch.tensor([r.num_tokens for r in requests], device=device),
            filters=Filters.from_requests(requests, device),
            all_greedy=all(p.is_greedy for p in params),
            num_logprobs=[p.logprobs for p in params],
        )


Record = TypeVar("Record")


def map_tensors(record: Record, move: Callable[[torch.Tensor], torch.Tensor]) -> Record:
    """A copy of one of the dataclasses above with `move(tensor)` for each tensor in it."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return move(value)
        return map_tensors(value, move) if is_dataclass(value) else value

    values = {field.name: moved(getattr(record, field.name)) for field in fields(record)}  # type: ignore[arg-type]
    return type(record)(**values)


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Choose a token for each row.

    logits: [B, V], any floating type. Greedy rows take the exact argmax of what they are given,
    whatever their neighbours do.
    """
    token_ids = argmax(logits)  # [B]; of a row with NaN, the place of a NaN
    is_valid = logits.gather(-1, token_ids[:, None]).squeeze(-1).isfinite()  # [B]
    if not metadata.all_greedy:
        drawn = draw(scale_and_filter(logits, metadata), metadata.seeds, metadata.positions)
        token_ids = torch.where(metadata.greedy | ~is_valid, token_ids, drawn)
    logprobs, logprob_ids = _logprobs(logits, token_ids, metadata.num_logprobs)
    return SamplerOutput(token_ids, is_valid, logprobs, logprob_ids, metadata.num_logprobs)


def scale_and_filter(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Logits [B, V] divided by temperature, float32, largest 0; filtered-out tokens are -inf."""
    logits = logits.float()
    # The largest becomes 0 first: dividing by a tiny temperature then underflows, never overflows.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / metadata.temperature[:, None]
    if (filters := metadata.filters) is not None:
        logits[filters.rows] = apply_filters(logits[filters.rows], filters)
    return logits


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits) by inverting the cumulative distribution.

    logits: [B, V] float32, largest 0. seeds, positions: [B] int64. Returns [B] int64.
    A token of probability zero is never drawn: it adds nothing to the sum.
    """
    cumulative = logits.exp().cumsum(dim=-1, dtype=torch.float64)  # [B, V]
    threshold = uniform(seeds, positions)[:, None] * cumulative[:, -1:]  # [B, 1]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each (seed, position), float64: 48 bits of a hash (splitmix64)."""
    bits = _mix(_mix(seeds) + positions)
    return ((bits >> 16) & (2**48 - 1)).double() / 2.0**48


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64, which wraps around like uint64 does.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    x = x + _int64(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: torch's own copies the sign bit of a signed integer."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _int64(value: int) -> int:
    """The signed integer with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int | None]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Log probabilities of the chosen token and of the most likely ones: [B, 1 + n] each."""
    wanted = [count for count in counts if count is not None]
    if not wanted:
        return None, None
    logprobs = logits.float().log_softmax(dim=-1)
    top, top_ids = logprobs.topk(min(max(wanted), logits.shape[-1]), dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    return torch.cat([chosen, top], dim=-1), torch.cat([token_ids[:, None], top_ids], dim=-1)
