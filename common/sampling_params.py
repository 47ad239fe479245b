"""`SamplingParams`: how one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .validation import require_choice, require_float, require_int


@dataclass(frozen=True)
class SamplingParams:
    """Wrong values raise `ValueError` naming the field and its limit (I4).

    max_tokens: most output tokens.
    temperature: 0 is greedy (exact argmax); above, logits are divided by it.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: then keep the smallest set of them whose probability reaches top_p.
    min_p: then keep those at least min_p times as likely as the most likely one.
    seed: same seed, same logits, same position: same token, on any engine (I2). None: random.
    stop: strings that end the output when they appear in it; the text ends before them (I6).
    stop_token_ids: tokens that end the output, beside the model's own end-of-sequence tokens. The
        token that ends it stays in `token_ids` and out of the text.
    ignore_eos: do not end at the model's own end-of-sequence tokens.
    logprobs: report log probabilities of this many most likely tokens, and of the chosen one. They
        are the model's own: before temperature and filters. None: none.
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
        require_int("top_k", self.top_k, low=0, high=2**63 - 2)
        require_float("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        require_float("min_p", self.min_p, low=0.0, high=1.0)
        require_int("seed", self.seed, low=-(2**63), high=2**63 - 1, optional=True)
        require_choice("ignore_eos", self.ignore_eos, (True, False))
        require_int("logprobs", self.logprobs, low=0, optional=True)
        require_choice("skip_special_tokens", self.skip_special_tokens, (True, False))
        # Normalised to tuples: a caller who changes a list later does not change the request.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(stop, (str, Sequence, type(None))):
        raise ValueError(f"stop must be a string or a list of them, got {stop!r}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold non-empty strings, got {string!r}")
    return strings


def _stop_token_ids(token_ids: Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(token_ids, str) or not isinstance(token_ids, (Sequence, type(None))):
        raise ValueError(f"stop_token_ids must be a list of integers, got {token_ids!r}")
    ids = tuple(token_ids or ())
    for token_id in ids:
        require_int("stop_token_ids", token_id, low=0)
    return ids
