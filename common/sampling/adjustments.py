"""Changes to the logits before the temperature: `logit_bias`, penalties and `min_tokens`.

The penalties depend on all tokens so far. When m5 plans a step, the newest token of a request is
still being computed. There are three ways to count it: the step waits for the token; the device
keeps a table of counts [rows, vocabulary] and adds each sampled token to it; or each step sends the
tokens of the request, and the device counts them. This module does the last. The newest token is a
placeholder, as in `input_ids`, and the forward stream replaces it by the token in the same way.

So no step waits. And there is no state that must be corrected when a request is retracted or
aborted, when a step is undone, or when a row gets another request: the counts of a step are a
function of the request's own tokens (I2). The price is a copy of 17 bytes for each token of each
request with penalties, in each step. A batch without such requests has no `Adjustments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..request import Request


@dataclass
class TokenBias:
    """Numbers to add to K single logits: `logit_bias`, and -inf for what `min_tokens` forbids."""

    rows: torch.Tensor  # [K] int64: an index of the adjusted rows
    token_ids: torch.Tensor  # [K] int64
    values: torch.Tensor  # [K] float32

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], device: torch.device | str
    ) -> TokenBias | None:
        rows, ids, values = list[int](), list[np.ndarray](), list[np.ndarray]()
        for row, request in enumerate(requests):
            if request.params.logit_bias:
                rows.append(row)
                ids.append(request.params.bias_arrays[0])
                values.append(request.params.bias_arrays[1])
            # The number of output tokens is known, even if the newest one is a placeholder.
            if request.num_output_tokens < request.params.min_tokens:
                assert request.end_token_ids is not None, "min_tokens needs to know what ends it"
                rows.append(row)
                ids.append(request.end_token_ids)
                values.append(np.full(len(request.end_token_ids), -np.inf))
        if not rows:
            return None
        return cls(
            rows=_tensor(np.repeat(rows, [len(part) for part in ids]), np.int64, device),
            token_ids=_tensor(np.concatenate(ids), np.int64, device),
            values=_tensor(np.concatenate(values), np.float32, device),
        )

    def add_to(self, logits: torch.Tensor) -> None:
        """Add the numbers to the logits of the adjusted rows, [n, V] float32."""
        places = self.rows * logits.shape[-1] + self.token_ids
        logits.view(-1).scatter_add_(0, places, self.values)


@dataclass
class Penalties:
    """The penalties of n adjusted rows, and the T tokens that they count, row by row."""

    rows: torch.Tensor  # [T] int64: an index of the adjusted rows
    token_ids: torch.Tensor  # [T] int64; in m5, a negative number is a placeholder
    is_output: torch.Tensor  # [T] int8: 1 for a token of the output, 0 for one of the prompt
    repetition: torch.Tensor  # [n] float32; 1 if off
    frequency: torch.Tensor  # [n] float32; 0 if off
    presence: torch.Tensor  # [n] float32; 0 if off

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], device: torch.device | str
    ) -> Penalties | None:
        params = [request.params for request in requests]
        if not any(p.has_penalties for p in params):
            return None
        tokens = [_counted_tokens(request) for request in requests]
        lengths = [len(part) for part in tokens]
        outputs = [r.num_output_tokens if n else 0 for r, n in zip(requests, lengths, strict=True)]
        is_output = np.zeros(sum(lengths), np.int8)
        for end, num_outputs in zip(np.cumsum(lengths), outputs, strict=True):
            is_output[end - num_outputs : end] = 1
        return cls(
            rows=_tensor(np.repeat(np.arange(len(requests)), lengths), np.int64, device),
            token_ids=_tensor(np.concatenate(tokens), np.int64, device),
            is_output=_tensor(is_output, np.int8, device),
            repetition=_tensor([p.repetition_penalty for p in params], np.float32, device),
            frequency=_tensor([p.frequency_penalty for p in params], np.float32, device),
            presence=_tensor([p.presence_penalty for p in params], np.float32, device),
        )

    def apply_to(self, logits: torch.Tensor) -> None:
        """Change the logits of the counted tokens, in [n, V] float32 of the adjusted rows."""
        assert not logits.is_cpu or bool((self.token_ids >= 0).all()), (
            "I2: a penalty counts a placeholder, which has not been replaced by its token"
        )
        logits = logits.view(-1)
        places = self.rows * (logits.numel() // len(self.repetition)) + self.token_ids  # [T]
        counts = torch.zeros_like(logits, dtype=torch.int32)
        counts.scatter_add_(0, places, self.is_output.int())  # integers: any order gives one sum
        count = counts[places].float()  # [T] of each token, in the output of its request
        old, repetition = logits[places], self.repetition[self.rows]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new = new - self.frequency[self.rows] * count
        new = new - self.presence[self.rows] * (count > 0)
        logits.scatter_(0, places, new)  # a token that is counted twice has the same number twice


@dataclass
class Adjustments:
    """The changes to the n rows of a batch that need any. Other rows are not changed."""

    rows: torch.Tensor  # [n] int64: the indices of these rows in the batch
    bias: TokenBias | None
    penalties: Penalties | None

    @classmethod
    def from_requests(
        cls, requests: Sequence[Request], device: torch.device | str
    ) -> Adjustments | None:
        rows = [i for i, request in enumerate(requests) if request.params.is_adjusted]
        adjusted = [requests[i] for i in rows]
        bias = TokenBias.from_requests(adjusted, device)
        penalties = Penalties.from_requests(adjusted, device)
        if bias is None and penalties is None:  # all of them have their `min_tokens`
            return None
        return cls(_tensor(rows, np.int64, device), bias, penalties)


def adjust(logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
    """Return adjusted logits, [B, V] float32. The tensor `logits` is not changed."""
    logits = logits.float()
    adjusted = logits[adjustments.rows]  # [n, V], a copy
    if adjustments.bias is not None:
        adjustments.bias.add_to(adjusted)
    if adjustments.penalties is not None:
        adjustments.penalties.apply_to(adjusted)
    return logits.index_copy(0, adjustments.rows, adjusted)


def _counted_tokens(request: Request) -> np.ndarray:
    """Return the tokens that the penalties of a request count, the tokens of its output last."""
    if not request.params.has_penalties:
        return np.empty(0, np.int64)
    tokens = request.token_array()
    return tokens if request.params.repetition_penalty != 1 else tokens[request.num_prompt_tokens :]


def _tensor(values: Any, dtype: type, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype)).to(device)
