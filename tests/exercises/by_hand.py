"""Requests and states built by hand: an exercise's tests need no exercise but their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common import Request
from common.output_text import OutputText
from common.tiny_models import byte_tokenizer
from tests.oracle import greedy

TOKENIZER = byte_tokenizer()


def make_request(
    name: str,
    prompt: int | list[int],
    *,
    output: int = 0,
    computed: int = 0,
    max_tokens: int = 50,
    max_model_len: int = 200,
) -> Request:
    """A greedy request that has `output` tokens already and KV of `computed` tokens.

    prompt: its tokens, or how many; no two tokens of it are alike.
    """
    tokens = prompt if isinstance(prompt, list) else [1 + i for i in range(prompt)]
    params = greedy(max_tokens, ignore_eos=True)
    request = Request(
        name, None, tokens, params, seed=0, max_model_len=max_model_len,
        text=OutputText(TOKENIZER, params), arrival_time=0.0,
    )  # fmt: skip
    request.token_ids += [100 + i for i in range(output)]
    request.num_computed_tokens = computed
    return request


def names(requests: Iterable[Request]) -> str:
    """`A B C`: what a message says of requests."""
    return " ".join(request.request_id for request in requests) or "nobody"


def scheduled(batch: Any) -> list[tuple[str, int]]:
    """[("A", 5), ("B", 1)]: who is in a batch, and how many tokens of each."""
    counts = zip(batch.requests, batch.num_scheduled_tokens, strict=True)
    return [(request.request_id, count) for request, count in counts]
