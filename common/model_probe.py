"""Try a model as an engine will use it, and compare with a full recompute of the same tokens.

A probe has two requests of different lengths. They are computed in a few steps: prefill, decode,
and on the paged engines both in one step. After each step the logits must be those of
`model(tokens, use_cache=False)`. Contexts are short, unless the configuration has a window that
requests can outgrow: then they exceed it.
"""

from __future__ import annotations

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
ROUNDING = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
}  # largest error, in parts of the largest logit
LOW_PRECISION_ROUNDING = 5e-2


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
        self.tokens = [
            [(3 + 29 * p + 5 * row) % min(vocab_size, 97) for p in range(length)]
            for row, length in enumerate(lengths)
        ]
        self.suspect: str | None = None  # a feature that would explain it if the probe fails
        self._expected: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def _recompute(self, row: int) -> torch.Tensor:
        """Logits after each of the last tokens: [at most KEPT, V]."""
        input_ids = torch.tensor([self.tokens[row]], device=self.model.device)
        logits = self.model(input_ids, use_cache=False, logits_to_keep=KEPT).logits[0]
        return logits[-KEPT:].float()

    def one_at_a_time(self) -> list[Span]:
        """Steps of one request, then of the other: a prompt, then a token each."""
        long = self._row_steps(0, max(1, len(self.tokens[0]) - 2))
        return [*long, *self._row_steps(1, 1)[:2]]

    def batched(self) -> list[list[Span]]:
        """Steps of both requests: the prompts, the shorter one of a single token; then decodes."""
        long = len(self.tokens[0])
        rows = [self._row_steps(0, max(1, long - 2)), self._row_steps(1, 1)]
        return [list(step) for step in zip(*rows, strict=False)]

    def mixed(self) -> list[list[Span]]:
        """Steps of a flat batch: two chunks; a decode beside a chunk; two decodes."""
        long, short = len(self.tokens[0]), len(self.tokens[1])
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
        ends = range(prompt, len(self.tokens[row]) + 1)
        return [Span(row, 0 if end == prompt else end - 1, end) for end in ends]

    def tokens_of(self, span: Span) -> list[int]:
        """The token ids that a span stands for."""
        return self.tokens[span.row][span.start : span.end]

    def page_table(self, page_size: int) -> torch.Tensor:
        """Pages for both requests, in no particular order: [2, P] int32. Page 0 is not used."""
        width = -(-len(self.tokens[0]) // page_size)
        return torch.arange(2 * width, 0, -1, dtype=torch.int32).view(width, 2).T.contiguous()

    def check(self, step: Sequence[Span], logits: torch.Tensor) -> None:
        """Compare the logits [N, V] after the last token of each span.

        Raises `ProbeError` where they are off by more than rounding.
        """
        expected = torch.stack([self._logits_after(span) for span in step])
        if logits.shape != expected.shape:
            raise ProbeError(f"logits have shape {list(logits.shape)}, not {list(expected.shape)}")
        scale = expected.abs().amax(dim=-1)
        error = float(((logits.float() - expected).abs().amax(dim=-1) / scale).max())
        if not error < ROUNDING.get(self.model.dtype, LOW_PRECISION_ROUNDING):
            raise ProbeError(f"logits are off by {error:.1%} of the largest")

    def _logits_after(self, span: Span) -> torch.Tensor:
        if span.row not in self._expected:
            self._expected[span.row] = self._recompute(span.row)
        return self._expected[span.row][span.end - 1 - len(self.tokens[span.row])]


def longest_limit(config: PretrainedConfig, max_model_len: int) -> int:
    """Return the largest number in a configuration, below `max_model_len`, that may be a window."""
    limits = [0]
    for name, value in config.get_text_config().to_dict().items():
        if isinstance(value, dict):
            limits += [
                n for key, n in value.items() if LIMIT_NAMES.search(str(key)) and _is_size(n)
            ]
        elif LIMIT_NAMES.search(name) and _is_size(value):
            limits.append(value)
    return max(limit for limit in limits if limit < max_model_len)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
