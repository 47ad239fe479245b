"""Requests and states built by hand, so that the tests of an exercise need only this exercise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from common import Request, SamplingParams
from tests.helpers.replaced import fail_forward

if TYPE_CHECKING:
    import numpy as np


def make_request(
    name: str,
    prompt: int | Sequence[int],
    *,
    output: int = 0,
    computed: int = 0,
    max_tokens: int = 50,
    max_model_len: int = 200,
) -> Request:
    """Return a greedy request that has `output` output tokens, and KV of `computed` tokens.

    prompt: the tokens of the prompt, or their number; then all of them are different.
    """
    tokens = [1 + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    request = request_with(params, tokens, name, max_model_len=max_model_len)
    request.token_ids += [100 + i for i in range(output)]
    request.num_computed_tokens = computed
    return request


def request_with(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2, 1),
    name: str = "r",
    end_token_ids: np.ndarray | None = None,
    max_model_len: int = 100,
) -> Request:
    """Return a request that waits, without a text. Its parameters may be any."""
    text: Any = None  # only the shell around a core reads it
    return Request(
        name, None, list(prompt), params, seed=params.seed or 0, max_model_len=max_model_len,
        text=text, arrival_time=0.0, end_token_ids=end_token_ids,
    )  # fmt: skip


def names(requests: Iterable[Request]) -> str:
    """Return the ids of requests for a message: `A B C`, or `none`."""
    return " ".join(request.request_id for request in requests) or "none"


def scheduled(batch: Any) -> list[tuple[str, int]]:
    """Return the requests of a batch and their numbers of tokens: [("A", 5), ("B", 1)]."""
    counts = zip(batch.requests, batch.num_scheduled_tokens, strict=True)
    return [(request.request_id, count) for request, count in counts]


def watch(owner: Any, name: str, note: Callable[..., object]) -> None:
    """Call `note` with the arguments of each call of a method, before the method runs."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, watched)


class Broken(Exception):
    """The error of a forward that a test makes fail."""


def break_next_forward(
    engine: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = Broken
) -> None:
    """Let the next forward fail in layer 1, after layer 0 has stored its keys and values."""
    fail_forward(monkeypatch, engine.loaded, 1, error)


def break_next_rows(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next forward fail as on a GPU: `run` returns, and reading its tokens fails."""

    class Result:
        def rows(self) -> Any:
            raise Broken

    monkeypatch.setattr(engine.core.runner, "run", lambda *_: Result())


def failing_step(engine: Any, chance: Random) -> list[Any]:
    """Run a step in which the forward fails, if there is one, and return the outputs."""
    error = chance.choice([Broken, KeyboardInterrupt])
    with pytest.MonkeyPatch.context() as patch:
        break_next_forward(engine, patch, error)
        try:
            return list(engine.step())
        except KeyboardInterrupt:  # the engine raises it again at the end of the call
            return []
