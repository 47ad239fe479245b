"""A request without an engine, for tests of schedulers and caches."""

from __future__ import annotations

from collections.abc import Sequence

from common import Request
from common.text.output_text import OutputText
from tests.helpers.fake_paged import TOKENIZER
from tests.helpers.oracle import greedy


def request_of(name: str, tokens: Sequence[int], max_tokens: int = 8) -> Request:
    """Return a greedy request with these prompt tokens."""
    params = greedy(max_tokens)
    return Request(
        name, None, list(tokens), params, seed=0, max_model_len=200,
        text=OutputText(TOKENIZER, params), arrival_time=0.0,
    )  # fmt: skip
