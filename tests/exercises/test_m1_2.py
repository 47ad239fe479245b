"""m1.2: only what is new. `ModelRunner.run` and `_cache_of`, on tiny-llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common import Request
from m1_single.model_runner import ModelRunner
from m1_single.schedule_batch import ScheduleBatch
from tests.conftest import shared_model
from tests.exercises.by_hand import make_request
from tests.helpers.oracle import assert_same_tokens, reference

PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture
def fed() -> Iterator[list[int]]:
    """A list that gets one entry per forward: the number of tokens fed, without cached ones."""
    counts: list[int] = []

    def note(_module: Any, args: Any, kwargs: Any) -> None:
        counts.append(int((kwargs.get("input_ids", args[0] if args else None)).shape[1]))

    model = shared_model("tiny-llama").model
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield counts
    hook.remove()


def make_runner(use_cache: bool = True) -> ModelRunner:
    return ModelRunner(shared_model("tiny-llama").model, use_cache)


def step(runner: ModelRunner, request: Request) -> tuple[int, dict[int, float] | None]:
    """Run one step by hand: compute all remaining tokens, and append the sampled token."""
    count = request.num_tokens - request.num_computed_tokens
    ((token_id, logprobs),) = runner.run(ScheduleBatch([request], [count])).rows()
    assert token_id is not None, "the logits are finite"
    if runner.use_cache:
        request.num_computed_tokens += count
    request.token_ids.append(token_id)
    return token_id, logprobs


def generate(runner: ModelRunner, request: Request, num_tokens: int) -> None:
    for _ in range(num_tokens):
        step(runner, request)


def assert_answer(request: Request) -> None:
    """I1: require the tokens of Hugging Face."""
    output = request.output_token_ids
    prompt = tuple(request.token_ids[: request.num_prompt_tokens])
    assert_same_tokens(reference("tiny-llama", prompt, len(output)), output)


def test_a_step_without_requests_computes_nothing(fed: list[int]) -> None:
    result = list(make_runner().run(ScheduleBatch([], [])).rows())
    assert (result, fed) == ([], []), "without a request there is no forward and no token"


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "recomputed"])
def test_one_answer(use_cache: bool) -> None:
    """With the cache and without it, the tokens are those of Hugging Face."""
    runner, request = make_runner(use_cache), make_request("A", PROMPT)
    generate(runner, request, 12)
    assert_answer(request)


def test_with_the_cache_a_token_is_fed_once(fed: list[int]) -> None:
    """The lesson, counted: 5 prompt tokens in the first step, then one token per step."""
    runner, request = make_runner(), make_request("A", PROMPT)
    generate(runner, request, 6)
    assert fed == [5, 1, 1, 1, 1, 1], "the prompt is fed once, then one new token per step"


def test_without_the_cache_everything_is_fed_again(fed: list[int]) -> None:
    runner, request = make_runner(use_cache=False), make_request("A", PROMPT)
    generate(runner, request, 6)
    assert fed == [5, 6, 7, 8, 9, 10], "all tokens are fed in each step"
    assert not runner.past_key_values, "I3: without the cache, no keys and values are kept"


def test_the_cache_holds_what_is_computed() -> None:
    """The newest token is not in the cache: the next step feeds it."""
    runner, request = make_runner(), make_request("A", PROMPT)
    for expected in (5, 6, 7):
        step(runner, request)
        cache = runner.past_key_values.get(request)
        assert cache is not None, (
            "I3: `past_key_values` has no cache of A. `free` looks for it under the request itself"
        )
        length = cache.get_seq_length()
        assert length == expected == request.num_computed_tokens, (
            f"I1: the cache has keys and values of {length} tokens, {expected} are computed"
        )


def test_a_position_is_the_number_of_tokens_before_it() -> None:
    """Rotary embeddings see only distances: with all positions one too high, answers stay right."""
    runner, request = make_runner(), make_request("A", PROMPT)
    seen: list[list[int]] = []

    def note(_module: Any, args: Any, kwargs: Any) -> None:
        seen.append((kwargs["position_ids"] if "position_ids" in kwargs else args[1])[0].tolist())

    model: Any = runner.model
    with model.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True):
        generate(runner, request, 3)
    assert seen == [[0, 1, 2, 3, 4], [5], [6]], (
        "I1: a position is the number of tokens before a token: steps of 5, 1 and 1 tokens"
    )


def test_only_the_last_token_has_logits() -> None:
    """A long prompt's logits would take more memory than its keys and values."""
    runner, request = make_runner(), make_request("A", PROMPT)
    shapes: list[tuple[int, ...]] = []

    def note(_module: Any, _args: Any, output: Any) -> None:
        shapes.append(tuple(output.logits.shape[:2]))

    with runner.model.register_forward_hook(note):
        generate(runner, request, 2)
    assert shapes == [(1, 1), (1, 1)], (
        "steps of 5 and 1 tokens: each computes the logits [1, 1, V] of its last token only"
    )


def test_a_prompt_of_one_token() -> None:
    runner, request = make_runner(), make_request("A", [7])
    generate(runner, request, 6)
    assert_answer(request)


def test_requests_do_not_share_a_cache() -> None:
    """Two requests run in turns: each continues where it was."""
    runner, requests = make_runner(), [make_request("A", PROMPT), make_request("B", [90, 91])]
    for _ in range(6):
        for request in requests:
            step(runner, request)
    for request in requests:
        assert_answer(request)


def test_a_request_that_has_lost_its_cache_computes_it_again(fed: list[int]) -> None:
    """The state after a failed forward: no token is computed, and all tokens are fed again."""
    runner, request = make_runner(), make_request("A", PROMPT)
    generate(runner, request, 3)
    runner.past_key_values.clear()
    request.num_computed_tokens = 0
    generate(runner, request, 3)
    assert_answer(request)
    assert fed == [5, 1, 1, 8, 1, 1], "step 4 feeds 5 + 3 tokens at once, then one per step"
