"""Sample tokens from logits, batched, with the same result for a request as if it were alone (I2).

Logits are adjusted by penalties, biases and grammars. Then `choose` takes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import repeat
from typing import Any, TypeVar

import torch

from ..engine_core import SampledToken
from ..request import Request
from .adjustments import Adjustments, adjust
from .choice import choose
from .draws import DrawParams, most_likely
from .logprobs import PromptLogprobs, PromptTokens, logprobs_of


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
    prompts: the log probabilities of tokens of prompts, if requests need some from this step.
    """

    token_ids: torch.Tensor
    is_valid: torch.Tensor
    logprobs: torch.Tensor | None
    logprob_ids: torch.Tensor | None
    num_logprobs: list[int | None]
    prompts: PromptLogprobs | None = None

    @classmethod
    def empty(cls) -> SamplerOutput:
        """Return the result of a step without work."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, none.bool(), None, None, [])

    def rows(self) -> Iterator[SampledToken]:
        """Wait for the device and yield (token id, log probabilities) row by row.

        Before, the requests get the log probabilities of their prompts.
        """
        if self.prompts is not None:
            self.prompts.deliver()
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
class SamplingMetadata:
    """The sampling parameters of a batch. It is built before the forward is launched, so that
    sampling follows the forward without a gap.
    """

    draws: DrawParams | None  # None if all rows are greedy
    num_logprobs: list[int | None]
    adjustments: Adjustments | None = None  # None if no row has a bias, a penalty or `min_tokens`
    prompts: PromptTokens | None = None  # None if no request needs its prompt's log probabilities
    # Takes the adjusted logits [B, V], and returns them with -inf for the tokens that no grammar
    # allows. None if no row has a grammar.
    mask: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[Request],
        device: torch.device | str,
        positions: Sequence[int] | None = None,
        prompts: PromptTokens | None = None,
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
            prompts=prompts,
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
    if metadata.adjustments is not None:
        logits = adjust(logits, metadata.adjustments)
    if metadata.mask is not None:
        logits = metadata.mask(logits)
    token_ids, is_valid = choose(logits, metadata.draws)
    if logits is not model_logits:
        is_valid = is_valid & most_likely(model_logits)[1]
    output = SamplerOutput(token_ids, is_valid, None, None, metadata.num_logprobs)
    wanted = [count for count in metadata.num_logprobs if count is not None]
    if wanted:
        top = logprobs_of(model_logits, token_ids, max(wanted))
        output.logprobs, output.logprob_ids = top
    if metadata.prompts is not None:
        output.prompts = metadata.prompts.logprobs
    return output
