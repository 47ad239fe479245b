"""`SamplingParams`: how the tokens of a request are chosen, and what ends its output."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..text.stop_strings import StopStrings
from ..validation import (
    LARGEST_INT,
    require_choice,
    require_float,
    require_int,
    require_list,
    require_text,
    shown,
)
from .structured import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

# Each limit bounds the time by which one request can delay the others.
MAX_STOP_STRINGS = 10_000  # checking and sorting that many takes about 10 ms, once
MAX_STOP_LENGTH = 1000  # characters; the search tries every length that a stop string has
MAX_STOP_TOKEN_IDS = 1_000_000  # more than any vocabulary has
MAX_LOGPROBS = 1000  # per token: a larger number takes longer than the forward of a small model
MAX_N = 1000  # all of them are queued at once
MAX_LOGIT_BIASES = 10_000  # per request: they go to the device in every step


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request.

    Wrong values raise `ValueError`, which names the field and its limit (I4). Names and meanings
    are those of vLLM. The parameters change the logits of the model in this order:

        min_tokens, logit_bias --> repetition_penalty --> frequency_penalty --> presence_penalty
        --> temperature --> top_k --> top_p --> min_p --> draw

    max_tokens: the maximum number of output tokens.
    temperature: 0 is greedy (exact argmax). Otherwise logits are divided by the temperature.
    top_k: keep the k most likely tokens; 0 keeps all tokens.
    top_p: then keep the smallest set of the most likely tokens that has a probability of at
        least top_p.
    min_p: then keep the tokens that are at least min_p times as likely as the most likely token.
    presence_penalty: in [-2, 2]; subtracted from the logit of each token that is in the output.
    frequency_penalty: in [-2, 2]; subtracted from the logit of a token once for each time that
        the token is in the output.
    repetition_penalty: in [0.01, 100]. The logit of each token that is in the prompt or in the
        output is divided by it if the logit is positive, and multiplied by it otherwise. 1: no
        penalty.
    logit_bias: a dict from token ids to numbers in [-100, 100], each of which is added to the logit
        of its token. None: no bias.
    min_tokens: until the output has this many tokens, the model's end-of-sequence tokens and
        `stop_token_ids` cannot be chosen (also with `ignore_eos`), and a stop string that is
        complete does not end the output. At most `max_tokens`.
    n: the number of outputs for the prompt, at most `MAX_N`. They share the request's id. Output i
        has the `index` i and draws with seed + i, so the first one is the output of n=1.
    seed: with the same seed, logits and position, every engine draws the same token (I2). None:
        a random seed.
    stop: strings that end the output when they appear in it. The text ends before the stop string
        (I6). At most `MAX_STOP_STRINGS`, each of at most `MAX_STOP_LENGTH` characters. None: no
        stop strings.
    stop_token_ids: tokens that end the output, in addition to the model's own end-of-sequence
        tokens. The token that ends the output is in `token_ids`, but not in the text. None: no
        additional tokens.
    ignore_eos: do not stop at the model's own end-of-sequence tokens.
    logprobs: report the log probabilities of this many most likely tokens, at most `MAX_LOGPROBS`,
        and of the chosen token. They are those of the model, before any of the changes above. None:
        report no log probabilities.
    prompt_logprobs: the same for each token of the prompt except the first. Such a request computes
        its whole prompt, also where a prefix cache has a part of it.
    skip_special_tokens: leave special tokens out of the text.
    structured_outputs: a JSON schema, a regular expression, choices, or a structural tag for the
        whole output. After the penalties, all tokens are excluded that the grammar does not allow
        next. An output that `max_tokens` or a stop string ends early is not complete. None: any
        text. Engines that cannot do it refuse the request.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    min_tokens: int = 0
    n: int = 1
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        require_int("max_tokens", self.max_tokens, low=1)
        require_float("temperature", self.temperature, low=0.0)
        require_int("top_k", self.top_k, low=0, high=LARGEST_INT - 1)
        require_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        require_float("min_p", self.min_p, low=0.0, high=1.0)
        require_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        require_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        require_float("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        require_int("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        require_int("n", self.n, low=1, high=MAX_N)
        require_int("seed", self.seed, low=-LARGEST_INT - 1, optional=True)
        require_choice("ignore_eos", self.ignore_eos, (True, False))
        for name in ("logprobs", "prompt_logprobs"):
            require_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS, optional=True)
        require_choice("skip_special_tokens", self.skip_special_tokens, (True, False))
        # Copied: if the caller changes a list later, the request does not change.
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.structured_outputs is not None:
            self._check_structured_outputs()

    def _check_structured_outputs(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise ValueError(
                "structured_outputs must be StructuredOutputsParams, got "
                f"{shown(self.structured_outputs)}"
            )
        if self.ignore_eos:
            raise ValueError(
                "structured_outputs needs ignore_eos=False: after the end of the grammar, only a "
                "token that ends the output is allowed"
            )

    def require_in_vocabulary(self, vocab_size: int) -> None:
        """Raise `ValueError` if a field needs a larger vocabulary than the model's."""
        for name in ("stop_token_ids", "logit_bias"):
            token_id = max(getattr(self, name) or (), default=0)
            if token_id >= vocab_size:
                raise ValueError(
                    f"{name} holds {token_id}, outside the vocabulary [0, {vocab_size})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise ValueError(
                    f"{name} must be at most the vocabulary's size {vocab_size}, got {count}"
                )

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def is_filtered(self) -> bool:
        """Return whether top-k, top-p or min-p may exclude a token."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def has_penalties(self) -> bool:
        """Return whether the tokens of the request change the logits of the next one."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def is_adjusted(self) -> bool:
        """Return whether a step may have to change the logits before the temperature."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0

    @cached_property
    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and the numbers of `logit_bias`, converted once."""
        import numpy as np  # not above: parameters are plain data

        bias = self.logit_bias or {}
        return np.array([*bias], np.int64), np.array([*bias.values()], np.float32)

    def of_child(self, seed: int, *, is_first: bool = True) -> Self:
        """Return the parameters of one of the n outputs: the same, with a seed of its own.

        The outputs share the prompt, so only the first one computes its log probabilities. What has
        been checked is not checked again, and what has been prepared is shared.
        """
        _ = self.stop_strings, self.bias_arrays  # prepare them now
        child = copy.copy(self)
        object.__setattr__(child, "n", 1)
        object.__setattr__(child, "seed", seed)
        if not is_first:
            object.__setattr__(child, "prompt_logprobs", None)
        return child

    @cached_property
    def stop_strings(self) -> StopStrings | None:
        """Return `stop`, prepared for the search once for all requests with these parameters."""
        return StopStrings(tuple(self.stop)) if self.stop else None


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    require_list("stop", strings, "strings, or one string", most=MAX_STOP_STRINGS)
    for string in (strings := tuple(strings)):
        require_text("stop", string, longest=MAX_STOP_LENGTH)
    return strings


def _stop_token_ids(token_ids: Sequence[int] | None) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    require_list("stop_token_ids", token_ids, "integers", most=MAX_STOP_TOKEN_IDS)
    ids = tuple(token_ids)
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= LARGEST_INT:
            require_int("stop_token_ids", token_id, low=0)
    return ids


def _logit_bias(bias: dict[int, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise ValueError(f"logit_bias must be a dict from token ids to numbers, got {shown(bias)}")
    if len(bias) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIASES} tokens, got {len(bias)}")
    for token_id, value in bias.items():
        require_int("logit_bias: a token id", token_id, low=0)
        require_float("logit_bias: a value", value, low=-100.0, high=100.0)
    return dict(bias)
