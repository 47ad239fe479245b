"""`SamplingParams`: how the tokens of a request are chosen, and what ends its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..text.stop_strings import StopStrings
from ..validation import (
    LARGEST_INT,
    require_choice,
    require_float,
    require_int,
    require_list,
    require_text,
)

# Each limit bounds the time by which one request can delay the others.
MAX_STOP_STRINGS = 10_000  # checking and sorting so many takes about 10 ms, once
MAX_STOP_LENGTH = 1000  # characters; the search tries every length that a stop string has
MAX_STOP_TOKEN_IDS = 1_000_000  # more than any vocabulary has
MAX_LOGPROBS = 1000  # per token: a larger number takes longer than the forward of a small model


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request.

    Wrong values raise `ValueError`, which names the field and its limit (I4).

    max_tokens: the maximum number of output tokens.
    temperature: 0 is greedy (exact argmax). Otherwise logits are divided by the temperature.
    top_k: keep the k most likely tokens; 0 keeps all tokens.
    top_p: then keep the smallest set of the most likely tokens that has a probability of at
        least top_p.
    min_p: then keep the tokens that are at least min_p times as likely as the most likely token.
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
        and of the chosen token. They are computed before temperature and filters. None: report no
        log probabilities.
    skip_special_tokens: leave special tokens out of the text.
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
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        require_int("max_tokens", self.max_tokens, low=1)
        require_float("temperature", self.temperature, low=0.0)
        require_int("top_k", self.top_k, low=0, high=LARGEST_INT - 1)
        require_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        require_float("min_p", self.min_p, low=0.0, high=1.0)
        require_int("seed", self.seed, low=-LARGEST_INT - 1, optional=True)
        require_choice("ignore_eos", self.ignore_eos, (True, False))
        require_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        require_choice("skip_special_tokens", self.skip_special_tokens, (True, False))
        # Copied to tuples: if the caller changes a list later, the request does not change.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def is_filtered(self) -> bool:
        """Return whether top-k, top-p or min-p may exclude a token."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def stop_strings(self) -> StopStrings | None:
        """Return `stop`, prepared for the search once for all requests with these parameters."""
        return StopStrings(tuple(self.stop)) if self.stop else None


class TokenIds(tuple[int, ...]):
    """A tuple of token ids with a fast `in`, which is used for each sampled token."""

    @cached_property
    def _as_set(self) -> frozenset[int]:
        return frozenset(self)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._as_set


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    require_list("stop", strings, "strings, or one string", most=MAX_STOP_STRINGS)
    for string in (strings := tuple(strings)):
        require_text("stop", string, longest=MAX_STOP_LENGTH)
    return strings


def _stop_token_ids(token_ids: Sequence[int] | None) -> TokenIds:
    if token_ids is None:
        return TokenIds()
    require_list("stop_token_ids", token_ids, "integers", most=MAX_STOP_TOKEN_IDS)
    ids = TokenIds(token_ids)
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= LARGEST_INT:
            require_int("stop_token_ids", token_id, low=0)
    return ids
