"""Try a model as an engine will use it, and compare with a full recompute of the same tokens.

A probe has two requests of different lengths. They are computed in a few steps: prefill, decode,
and on the paged engines both in one step. After each step the logits must be those of
`model(tokens, use_cache=False)`. Contexts are short, unless the configuration has a window that
requests can outgrow: then they exceed it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

LONG, SHORT = 7, 4  # tokens of the two requests
KEPT = 8  # tokens at the end of a request whose logits are compared
# Numbers of a configuration with such names may change attention from some position on.
LIMIT_NAMES = re.compile(
    r"window(?!_layers)|chunk|topk$|floor_scale|local|span|stride|block|compress"
)


class ProbeError(ValueError):
    """The logits of a step are not those of a full recompute."""


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of one of the probe's requests."""

    row: int
    start: int
    end: int


class Probe:
    """Two requests, and the logits that a full recompute gives after each of their tokens."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.model = model
        longest = longest_limit(model.config, max_model_len)
        lengths = (min(max_model_len, longest + LONG), min(max_model_len, SHORT))
        embedding: Any = model.get_input_embeddings()
        vocab_size = int(embedding.weight.shape[0])
        self.lengths, self.vocab_size = lengths, min(vocab_size, 97)
        self.suspect: str | None = None  # a feature that would explain it if the probe fails
        self.attempt = 0
        self.errors: dict[Span, float] = {}  # the smallest of all attempts
        self._expected: dict[int, torch.Tensor] = {}

    def again(self) -> bool:
        """Whether the steps are to be run, with other tokens each time.

        In low precision, rounding may send a token to another expert of a mixture, and a step then
        differs much. It does so with some tokens; a model that is computed wrongly, with all.
        Raises `ProbeError` where a step has been wrong in every attempt.
        """
        in_float32 = self.model.dtype in (torch.float32, torch.float64)
        tolerance, attempts = (1e-3, 1) if in_float32 else (5e-2, 4)
        wrong = [error for error in self.errors.values() if not error < tolerance]
        if self.attempt and not wrong:
            return False
        if self.attempt == attempts:
            raise ProbeError(f"logits are off by {max(wrong):.1%} of the largest")
        self.attempt += 1
        self._expected.clear()
        self.tokens = [
            [(3 + 29 * p + 5 * row + 11 * self.attempt) % self.vocab_size for p in range(length)]
            for row, length in enumerate(self.lengths)
        ]
        return True

    @torch.inference_mode()
    def _recompute(self, row: int) -> torch.Tensor:
        """Logits after each of the last tokens: [at most KEPT, V]."""
        input_ids = torch.tensor([self.tokens[row]], device=self.model.device)
        logits = self.model(input_ids, use_cache=False, logits_to_keep=KEPT).logits[0]
        return logits[-KEPT:].float()

    def one_at_a_time(self) -> list[Span]:
        """Steps of one request, then of the other: a prompt, then a token each."""
        long = self._row_steps(0, max(1, self.lengths[0] - 2))
        return [*long, *self._row_steps(1, 1)[:2]]

    def batched(self) -> list[list[Span]]:
        """Steps of both requests: the prompts, the shorter one of a single token; then decodes."""
        long = self.lengths[0]
        rows = [self._row_steps(0, max(1, long - 2)), self._row_steps(1, 1)]
        return [list(step) for step in zip(*rows, strict=False)]

    def mixed(self) -> list[list[Span]]:
        """Steps of a flat batch: two chunks; a decode beside a chunk; two decodes."""
        long, short = self.lengths
        middle = max(0, long - 4)
        steps = [
            [Span(1, 0, 2), Span(0, 0, middle)],
            [Span(1, 2, 3), Span(0, middle, long - 1)],
            [Span(0, long - 1, long), Span(1, 3, 4)],
        ]
        spans = [
            [span for span in step if span.start < span.end <= (long, short)[span.row]]
            for step in steps
        ]
        # A decode is a span of one token. Decodes come before chunks.
        return [sorted(step, key=lambda span: span.end - span.start > 1) for step in spans if step]

    def _row_steps(self, row: int, prompt: int) -> list[Span]:
        """The first `prompt` tokens of a request, then one at a time."""
        ends = range(prompt, self.lengths[row] + 1)
        return [Span(row, 0 if end == prompt else end - 1, end) for end in ends]

    def tokens_of(self, span: Span) -> list[int]:
        """The token ids that a span stands for."""
        return self.tokens[span.row][span.start : span.end]

    def page_table(self, page_size: int) -> torch.Tensor:
        """Pages for both requests, in no particular order: [2, P] int32. Page 0 is not used."""
        width = -(-self.lengths[0] // page_size)
        return torch.arange(2 * width, 0, -1, dtype=torch.int32).view(width, 2).T.contiguous()

    def check(self, step: Sequence[Span], logits: torch.Tensor) -> None:
        """Compare the logits [N, V] after the last token of each span with the full recompute.

        Raises `ProbeError` where their shape is another one.
        """
        expected = torch.stack([self._logits_after(span) for span in step])
        if logits.shape != expected.shape:
            raise ProbeError(f"logits have shape {list(logits.shape)}, not {list(expected.shape)}")
        errors = (logits.float() - expected).abs().amax(dim=-1) / expected.abs().amax(dim=-1)
        for span, error in zip(step, errors.tolist(), strict=True):
            error = math.inf if math.isnan(error) else error
            self.errors[span] = min(error, self.errors.get(span, math.inf))

    def _logits_after(self, span: Span) -> torch.Tensor:
        if span.row not in self._expected:
            self._expected[span.row] = self._recompute(span.row)
        return self._expected[span.row][span.end - 1 - self.lengths[span.row]]


def longest_limit(config: PretrainedConfig, max_model_len: int) -> int:
    """Return the largest number in a configuration, below `max_model_len`, that may be a window."""
    limits = [0]
    for name, value in vars(config.get_text_config()).items():
        if isinstance(value, dict):
            limits += [
                n for key, n in value.items() if LIMIT_NAMES.search(str(key)) and _is_size(n)
            ]
        elif LIMIT_NAMES.search(name) and _is_size(value):
            limits.append(value)
    return max(limit for limit in limits if limit < max_model_len)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
