"""Run a model as an engine will use it, and compare it with a full recompute of the same tokens.

A probe has two requests of different lengths. They are computed in a few steps: prefill, decode,
and on the paged engines both in one step. After each step, the logits must equal those of
`model(tokens, use_cache=False)`. The contexts are short, with one exception: if the configuration
has a window that requests can exceed, the longer request exceeds it. A `SlotCache` shows whether a
model works with a cache other than its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

LONG, SHORT = 7, 4  # the number of tokens of the two requests
KEPT = 8  # the logits of at most that many tokens at the end of a request are compared
# A number in a configuration with such a name may change attention from some position on.
LIMIT_NAMES = re.compile(
    r"window(?!_layers)|chunk|topk$|floor_scale|local|span|stride|block|compress"
)

JUNK = 7.0  # the content of slots that no query may read


class ProbeError(ValueError):
    """The logits of a step differ from those of a full recompute."""


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of one request of the probe."""

    row: int
    start: int
    end: int


class Probe:
    """Two requests, and the logits after their tokens according to a full recompute."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.model = model
        longest = longest_limit(model.config, max_model_len)
        lengths = (min(max_model_len, longest + LONG), min(max_model_len, SHORT))
        embedding: Any = model.get_input_embeddings()
        vocab_size = int(embedding.weight.shape[0])
        self.lengths, self.vocab_size = lengths, min(vocab_size, 97)
        self.suspect: str | None = None  # a feature that would explain a failure of the probe
        self.attempt = 0
        self.errors: dict[Span, float] = {}  # of each span, the smallest error of all attempts
        self._expected: dict[int, torch.Tensor] = {}

    def again(self) -> bool:
        """Return whether the caller must run the steps, with different tokens in each attempt.

        In low precision, rounding may send a token to another expert of a mixture of experts. The
        logits of that step are then very different. This happens with some tokens only. A model
        that is computed wrongly fails with all tokens. Raises `ProbeError` if a step was wrong in
        every attempt.
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
        """Return the logits after each of the last tokens of a request: [at most KEPT, V]."""
        input_ids = torch.tensor([self.tokens[row]], device=self.model.device)
        logits = self.model(input_ids, use_cache=False, logits_to_keep=KEPT).logits[0]
        return logits[-KEPT:].float()

    def one_at_a_time(self) -> list[Span]:
        """Return the steps of one request, then of the other.

        The first step of a request computes its prompt, each later one computes a token.
        """
        long = self._row_steps(0, max(1, self.lengths[0] - 2))
        return [*long, *self._row_steps(1, 1)[:2]]

    def batched(self) -> list[list[Span]]:
        """Return steps of both requests together: a step with both prompts, then decode steps.

        The shorter prompt has a single token.
        """
        long = self.lengths[0]
        rows = [self._row_steps(0, max(1, long - 2)), self._row_steps(1, 1)]
        return [list(step) for step in zip(*rows, strict=False)]

    def mixed(self) -> list[list[Span]]:
        """Return steps of a flat batch: two chunks; then a decode and a chunk; then two decodes."""
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
        """Return the steps of a request: its first `prompt` tokens, then one token in each step."""
        ends = range(prompt, self.lengths[row] + 1)
        return [Span(row, 0 if end == prompt else end - 1, end) for end in ends]

    def tokens_of(self, span: Span) -> list[int]:
        """Return the token ids of a span."""
        return self.tokens[span.row][span.start : span.end]

    def page_table(self, page_size: int) -> torch.Tensor:
        """Return a page table for both requests: [2, P] int32.

        The pages are out of order. Page 0 is not used.
        """
        width = -(-self.lengths[0] // page_size)
        return torch.arange(2 * width, 0, -1, dtype=torch.int32).view(width, 2).T.contiguous()

    def check(self, step: Sequence[Span], logits: torch.Tensor) -> None:
        """Compare the logits [N, V] after the last token of each span with the full recompute.

        Raises `ProbeError` if their shape is wrong.
        """
        expected = torch.stack([self._logits_after(span) for span in step])
        if logits.shape != expected.shape:
            raise ProbeError(f"logits have shape {list(logits.shape)}, not {list(expected.shape)}")
        errors = (logits.float() - expected).abs().amax(dim=-1)
        errors = errors.where(errors == 0, errors / expected.abs().amax(dim=-1))  # 0 of 0 is right
        for span, error in zip(step, errors.tolist(), strict=True):
            error = math.inf if math.isnan(error) else error
            self.errors[span] = min(error, self.errors.get(span, math.inf))

    def _logits_after(self, span: Span) -> torch.Tensor:
        if span.row not in self._expected:
            self._expected[span.row] = self._recompute(span.row)
        return self._expected[span.row][span.end - 1 - self.lengths[span.row]]


def longest_limit(config: PretrainedConfig, max_model_len: int) -> int:
    """Return the largest number below `max_model_len` in a configuration that may be a window."""
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


@dataclass(frozen=True)
class LayerKV:
    """The shape of one layer's keys and values for one token, and what its attention needs.

    `window` and `variants` are known only if the model calls a registered attention function.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # a query sees that many tokens, itself included. None: all
    variants: tuple[str, ...] = ()  # other arguments that change what attention computes


class SlotCache:
    """Keys and values of a few requests, one row for each, used as `past_key_values` of a model.

    The token at position p of a request is in slot p of the request's row. A prefill attends to its
    own keys and values. A decode gets all slots of its row; the attention mask hides the slots that
    it must not read.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.positions = torch.empty(0, 0, dtype=torch.int64)  # [B, T]
        self.context = 0

    def begin_step(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Set the `positions` [B, T] of the tokens of the next forward.

        Returns the attention mask of that forward, [B, 1, T, S], to be added to the scores.
        """
        self.positions, self.context = positions, int(positions.max()) + 1
        slots = torch.arange(self.context, device=positions.device)
        return additive_mask(slots <= positions[:, None, :, None], dtype)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values, [B, kv_heads, T, head_dim]; return those to attend to."""
        if key.shape[2] == self.context:  # a prefill
            self.layers[layer_idx] = key, value
            return key, value
        stored = tuple(
            self._stored(old, new)
            for old, new in zip(self.layers[layer_idx], (key, value), strict=True)
        )
        self.layers[layer_idx] = stored[0], stored[1]
        return self.layers[layer_idx]

    def _stored(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return the slots of a layer, [B, heads, S, head_dim], with one more token in each row."""
        batch, heads, length, dim = old.shape
        missing = self.context - length
        memory = torch.cat([old, old.new_full((batch, heads, missing, dim), JUNK)], dim=2)
        memory[torch.arange(batch), :, self.positions[:, 0]] = new[:, :, 0]
        return memory

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before this forward. Some models ask for it.

        With `position_ids` given, a model must not use the answer.
        """
        return self.context - self.positions.shape[-1]

    def shapes(self) -> list[LayerKV]:
        """Return the shape of each layer. Raises `ValueError` if a layer has not been used."""
        return in_order(
            {i: LayerKV(k.shape[1], k.shape[3], v.shape[3]) for i, (k, v) in self.layers.items()}
        )


def in_order(layers: dict[int, LayerKV]) -> list[LayerKV]:
    """Return the layers by index. Raises `ValueError` if there is no layer, or one is missing."""
    if not layers or sorted(layers) != list(range(len(layers))):
        raise ValueError(f"the layers with keys and values are {sorted(layers)}")
    return [layers[index] for index in range(len(layers))]


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a bool mask (True: may be attended to) to numbers that are added to the scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)
