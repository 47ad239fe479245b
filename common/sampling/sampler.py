"""Sample tokens from logits, batched, with the same result for a request as if it were alone (I2).

A draw is a pure function of (logits, seed, position). There is no random generator, because its
state would depend on the other requests in the batch. Instead, a counter-based hash of (seed,
position) gives one uniform number, and the inverse of the cumulative distribution converts it to a
token. The host computes the hash. The rest is a few tensor operations, the same on CPU and GPU.

    logits --adjust, / temperature--> top-k --> top-p --> min-p --> softmax --> cumulative sum
    hash(seed, position) --> u in (0, 1)  ------------------------------> first token above u
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.functional import pad

from ..engine_core import SampledToken
from ..request import Request
from .adjustments import Adjustments, adjust
from .argmax import argmax
from .filters import Filters, apply_filters

BLOCK = 1024  # tokens that `draw` adds up together


@dataclass
class SamplerOutput:
    """One token for each row, still on the device.

    token_ids: [B] int64. All ids are in the vocabulary, also in invalid rows: the next step may
        begin to compute these tokens before the host has read `is_valid`.
    is_valid: [B] bool. False if the logits contain NaN or inf, or only -inf. They are then not a
        distribution, and the token has no meaning. Also False if `adjust` or the mask leaves only
        -inf.
    logprobs, logprob_ids: [B, 1 + n] float32 and int64. The chosen token is first, then the n most
        likely tokens; n is the largest number that a row requests. None if no row requests any.
    num_logprobs: the number that each row requests; None for a row without log probabilities.
    """

    token_ids: torch.Tensor
    is_valid: torch.Tensor
    logprobs: torch.Tensor | None
    logprob_ids: torch.Tensor | None
    num_logprobs: list[int | None]

    @classmethod
    def empty(cls) -> SamplerOutput:
        """Return the result of a step without work."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, none.bool(), None, None, [])

    def rows(self) -> Iterator[SampledToken]:
        """Wait for the device and yield (token id, log probabilities) row by row."""
        token_ids: list[int | None] = self.token_ids.tolist()
        is_valid = self.is_valid.tolist()
        if not all(is_valid):
            rows = zip(token_ids, is_valid, strict=True)
            token_ids = [token_id if valid else None for token_id, valid in rows]
        if self.logprobs is None or self.logprob_ids is None:
            yield from zip(token_ids, repeat(None))
            return
        columns = zip(token_ids, self.logprob_ids.tolist(), self.logprobs.tolist(), strict=True)
        for (token_id, ids, values), count in zip(columns, self.num_logprobs, strict=True):
            if count is None:
                yield token_id, None
            else:
                yield token_id, dict(zip(ids[: 1 + count], values[: 1 + count], strict=True))


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


@dataclass
class SamplingMetadata:
    """The sampling parameters of a batch. It is built before the forward is launched, so that
    sampling follows the forward without a gap.
    """

    draws: DrawParams | None  # None if all rows are greedy
    num_logprobs: list[int | None]
    adjustments: Adjustments | None = None  # None if no row has a bias, a penalty or `min_tokens`
    # Takes the adjusted logits [B, V], and returns them with -inf for the tokens that no grammar
    # allows. None if no row has a grammar.
    mask: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[Request],
        device: torch.device | str,
        positions: Sequence[int] | None = None,
    ) -> SamplingMetadata:
        """Return the metadata of one token of each request, by default of its next token.

        positions: the number of tokens before that token. It decides the draw (I2).
        """
        positions = positions or [len(request.token_ids) for request in requests]
        draws = not all(request.params.is_greedy for request in requests)
        adjusted = any(request.params.is_adjusted for request in requests)
        return cls(
            draws=DrawParams.from_requests(requests, positions, device) if draws else None,
            num_logprobs=[request.params.logprobs for request in requests],
            adjustments=Adjustments.from_requests(requests, device) if adjusted else None,
        )

    def resolve(self, tokens_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace placeholders among the tokens that penalties count.

        In m5, the forward stream calls this at a time when the tokens have been computed.
        """
        if self.adjustments is not None and (penalties := self.adjustments.penalties) is not None:
            penalties.token_ids = tokens_of(penalties.token_ids)


Data = TypeVar("Data")


def map_tensors(data: Data, move: Callable[[torch.Tensor], torch.Tensor]) -> Data:
    """Return a copy of a dataclass of this file, with each tensor replaced by `move(tensor)`."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return move(value)
        return map_tensors(value, move) if is_dataclass(value) else value

    values = {field.name: moved(getattr(data, field.name)) for field in fields(data)}  # type: ignore[arg-type]
    return type(data)(**values)


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Choose a token for each row.

    logits: [B, V], any floating-point type. A greedy row gets the exact argmax of its logits,
    independent of the other rows. Log probabilities are those of `logits`, before any change.
    """
    model_logits = logits
    token_ids, is_valid = most_likely(logits)
    if metadata.adjustments is not None:
        logits = adjust(logits, metadata.adjustments)
    if metadata.mask is not None:
        logits = metadata.mask(logits)
    if logits is not model_logits:
        token_ids, is_left = most_likely(logits)
        is_valid = is_valid & is_left
    if (draws := metadata.draws) is not None:
        drawn = draw(scale_and_filter(logits, draws), draws.uniforms)
        token_ids = torch.where(draws.greedy | ~is_valid, token_ids, drawn)
    logprobs, logprob_ids = _logprobs(model_logits, token_ids, metadata.num_logprobs)
    return SamplerOutput(token_ids, is_valid, logprobs, logprob_ids, metadata.num_logprobs)


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
        logits[filters.rows] = apply_filters(logits[filters.rows], filters)
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


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int | None]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return log probabilities and ids of the chosen and the most likely tokens: [B, 1 + n]."""
    wanted = [count for count in counts if count is not None]
    if not wanted:
        return None, None
    logprobs = logits.float().log_softmax(dim=-1)
    top, top_ids = logprobs.topk(min(max(wanted), logits.shape[-1]), dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    return torch.cat([chosen, top], dim=-1), torch.cat([token_ids[:, None], top_ids], dim=-1)
