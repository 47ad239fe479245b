"""Log probabilities: of the token that was sampled, and of the tokens of a prompt.

Those of a prompt are computed beside its chunks. A token of the prompt has the probability that the
model gave it after the tokens before it, so the first one has none.

    prompt      A B C D E        chunk 1: A B C gives B, C, D        chunk 2: D E gives E
    step        forward of its T tokens -> hidden states [T, H]
                head, for M tokens at a time -> logits [M, V] -> log probabilities [M, 1 + n]

The logits [T, V] of a long chunk would be larger than the model, so they never exist at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from transformers import PreTrainedModel

from ..hf.hidden_states import HiddenStates, hidden_states_read
from ..request import Request

LOGITS_AT_ONCE = 2**22  # numbers: 16 MiB in float32
Run = TypeVar("Run", bound=Callable[..., Any])


class Span(NamedTuple):
    """Consecutive tokens of a prompt, `prompt_token_ids[start : start + num_tokens]`."""

    request: Request
    start: int
    num_tokens: int


@dataclass
class PromptLogprobs:
    """The log probabilities of some tokens of prompts.

    values, token_ids: [M, 1 + n] float32 and int64, as in `SamplerOutput`, for the spans one after
        the other.
    """

    values: torch.Tensor
    token_ids: torch.Tensor
    spans: list[Span]

    def deliver(self) -> None:
        """Give them to their requests. They must be on the host.

        A request keeps the first ones that it gets. A step that is undone delivers none.
        """
        rows = zip(self.token_ids.tolist(), self.values.tolist(), strict=True)
        for request, start, num_tokens in self.spans:
            known, num_top = request.prompt_logprobs, request.params.prompt_logprobs
            assert known is not None and num_top is not None, f"{request} has not asked for them"
            for position in range(start, start + num_tokens):
                ids, values = next(rows)
                if known[position] is None:
                    pairs = zip(ids[: 1 + num_top], values[: 1 + num_top], strict=True)
                    known[position] = dict(pairs)


@dataclass
class PromptTokens:
    """M tokens of prompts. A step computes their log probabilities.

    indices: [M] int64. Where the token before each of them is among the tokens of the forward.
    token_ids: [M] int64, the tokens.
    num_logprobs: n, the largest number of most likely tokens that a request asks for.
    logprobs: the result, once the forward has run.
    """

    indices: torch.Tensor
    token_ids: torch.Tensor
    spans: list[Span]
    num_logprobs: int
    logprobs: PromptLogprobs | None = None

    @classmethod
    def of_step(
        cls,
        tokens_per_request: Iterable[tuple[Request, int]],
        device: torch.device | str,
        width: int | None = None,
    ) -> PromptTokens | None:
        """Return those of a step, or None if no request needs any.

        tokens_per_request: how many tokens of each request the step computes.
        width: T, if the forward has a row of T tokens for each request; None if all tokens are in
            one row, without padding.
        """
        indices, token_ids, spans, place = list[int](), list[int](), list[Span](), 0
        pairs = list(tokens_per_request)
        if not needing(request for request, _ in pairs):
            return None
        for request, num_tokens in pairs:
            if request.needs_prompt_logprobs:
                start = request.num_computed_tokens + 1
                count = min(num_tokens, request.num_prompt_tokens - start)
                if count > 0:
                    indices += range(place, place + count)
                    token_ids += request.prompt_token_ids[start : start + count]
                    spans.append(Span(request, start, count))
            place += num_tokens if width is None else width
        if not spans:
            return None
        most = max(span.request.params.prompt_logprobs or 0 for span in spans)
        return cls(
            torch.tensor(indices, device=device),
            torch.tensor(token_ids, device=device),
            spans,
            most,
        )

    def compute(self, states: HiddenStates) -> PromptLogprobs:
        """Return their log probabilities. states: of the forward that has computed the step."""
        vocab_size = states.model.config.get_text_config().vocab_size
        size = max(1, LOGITS_AT_ONCE // vocab_size)
        parts = [
            logprobs_of(states.logits(indices), token_ids, self.num_logprobs)
            for indices, token_ids in zip(
                self.indices.split(size), self.token_ids.split(size), strict=True
            )
        ]
        values, token_ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return PromptLogprobs(values, token_ids, self.spans)


def needing(requests: Iterable[Request]) -> list[Request]:
    """Return the requests that need log probabilities of their prompts: in most steps none."""
    # An attribute first: a property takes three times as long, and a step may have 256 requests.
    asking = [request for request in requests if request.prompt_logprobs is not None]
    return [request for request in asking if request.needs_prompt_logprobs]


def with_prompt_logprobs(run: Run) -> Run:
    """Decorate `ModelRunner.run`: its output also has the log probabilities of prompts.

    The first arguments of `run` are the runner and the batch. It calls the model once.
    """

    @functools.wraps(run)
    def wrapped(runner: Any, batch: Any, *args: Any) -> Any:
        if not needing(batch.requests):
            return run(runner, batch, *args)
        with hidden_states_read(runner.model) as states:
            output = run(runner, batch, *args)
        num_rows, width, _ = states.of_all_tokens.shape
        in_rows = width if num_rows > 1 else None
        prompts = PromptTokens.of_step(batch.tokens_per_request(), runner.model.device, in_rows)
        output.prompts = None if prompts is None else prompts.compute(states)
        return output

    return cast("Run", wrapped)


@contextmanager
def prompts_read(model: PreTrainedModel, prompts: PromptTokens | None) -> Iterator[None]:
    """Return a context for the forward of a step. At its end, `prompts.logprobs` is there.

    m5 prepares `prompts` before the forward is launched. The others use `with_prompt_logprobs`.
    """
    if prompts is None:
        yield
        return
    with hidden_states_read(model) as states:
        yield
    prompts.logprobs = prompts.compute(states)


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log probabilities and ids of one token of each row, and of the n most likely ones.

    logits: [B, V]. token_ids: [B]. Both results are [B, 1 + n], float32 and int64.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    top, top_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    return torch.cat([chosen, top], dim=-1), torch.cat([token_ids[:, None], top_ids], dim=-1)
