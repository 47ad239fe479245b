"""m2.4: a padded batch and its mask. `InputBuilder.prepare` and `_causal_mask`."""

from __future__ import annotations

import functools

import pytest
import torch

from common import EngineConfig, Request
from m2_continuous.model_input import ModelInput
from m2_continuous.model_runner import ModelRunner
from m2_continuous.schedule_batch import ScheduleBatch
from milestones.lab.instruments.hash_model import VOCAB_SIZE, HashModel
from tests.exercises.by_hand import make_request


@functools.cache
def runner() -> ModelRunner:
    config = EngineConfig(max_model_len=64, max_num_seqs=8)
    return ModelRunner(HashModel().eval(), config)  # type: ignore[arg-type]


def prefill(*prompts: list[int], rows: list[int] | None = None) -> ModelInput:
    """Return the input of a step in which these prompts join."""
    requests = [make_request(f"{i}", prompt) for i, prompt in enumerate(prompts)]
    return prepare(requests, [len(prompt) for prompt in prompts], rows)


def decode(*computed: int) -> ModelInput:
    """Return the input of a decode: requests with `computed` cached tokens feed token 100."""
    requests = [make_request(f"{i}", n, output=1, computed=n) for i, n in enumerate(computed)]
    return prepare(requests, [1] * len(requests))


def prepare(
    requests: list[Request], counts: list[int], rows: list[int] | None = None
) -> ModelInput:
    for i, request in enumerate(requests):
        request.row = i if rows is None else rows[i]
    return runner().inputs.prepare(ScheduleBatch(requests, counts))


def sees(inputs: ModelInput, query: int, token: int) -> list[int]:
    """Return the slots that the query of a token may attend to: those with mask 0."""
    batch, width = inputs.input_ids.shape
    shape = tuple(inputs.attention_mask.shape)
    assert shape[:-1] in [(batch, 1, width), (1, 1, width)], (
        f"the mask is [B or 1, 1, T, S] with B={batch} and T={width}, not {list(shape)}"
    )
    mask = inputs.attention_mask.expand(batch, 1, width, -1)[query, 0, token]
    assert ((mask == 0) | (mask < -1e30)).all(), (
        f"each entry of the mask is 0 or very negative: {mask.tolist()}"
    )
    return torch.nonzero(mask == 0).flatten().tolist()


PROMPTS = ([11, 12, 13], [21], [31, 32, 33, 34, 35])


def test_prompts_are_padded_on_the_right() -> None:
    inputs = prefill(*PROMPTS)
    ids, positions = inputs.input_ids, inputs.position_ids.expand(3, -1)
    assert tuple(ids.shape) == (3, 5), "3 prompts, the longest has 5 tokens"
    for i, prompt in enumerate(PROMPTS):
        assert ids[i, : len(prompt)].tolist() == prompt, f"row {i} must begin with prompt {i}"
        assert positions[i, : len(prompt)].tolist() == list(range(len(prompt))), (
            f"I1: the position of a token in prompt {i} is the number of tokens before it"
        )
        assert all(position >= len(prompt) for position in positions[i, len(prompt) :]), (
            f"I1: row {i} has positions {positions[i].tolist()}, and its prompt has {len(prompt)} "
            "tokens: padding is stored too, and must not be stored over the prompt"
        )
    assert ((ids >= 0) & (ids < VOCAB_SIZE)).all(), "padding is fed too: it must be valid tokens"


def test_a_request_that_starts_again_feeds_its_output_too() -> None:
    """Its row was lost after a failed forward: 3 prompt tokens and 2 of output are computed."""
    a, r = make_request("A", [11]), make_request("R", [21, 22, 23], output=2)
    fed = prepare([a, r], [1, 5]).input_ids[1].tolist()
    assert fed == [21, 22, 23, 100, 101], "I1: R has 5 tokens, and none of them is in the cache"


def test_a_decode_feeds_the_newest_token_at_its_position() -> None:
    inputs = decode(3, 7, 1)
    assert inputs.input_ids.tolist() == [[100]] * 3, "the newest token of each request is 100"
    positions = inputs.position_ids.flatten().tolist()
    assert positions == [3, 7, 1], "I1: 3, 7 and 1 tokens come before the fed ones"


def test_each_request_is_sampled_at_its_own_last_token() -> None:
    """The last column is padding for all prompts but the longest."""
    last = prefill(*PROMPTS).last_token.tolist()
    assert last == [2, 0, 4], "prompts of 3, 1 and 5 tokens end at index 2, 0 and 4"
    assert decode(3, 7).last_token.tolist() == [0, 0], "in a decode each request has one token"


def test_rows_are_the_owners_rows() -> None:
    """A joining request is first in its batch, but its row lies after the rows in use."""
    rows = prefill(*PROMPTS, rows=[4, 5, 2]).rows.tolist()
    assert rows == [4, 5, 2], "these are the rows that the requests own, in the order of the batch"


def test_the_context_reaches_to_the_longest_request() -> None:
    for inputs, longest in ((prefill(*PROMPTS), 5), (decode(3, 7, 1), 8), (decode(1), 2)):
        widths = inputs.longest_context, inputs.attention_mask.shape[-1]
        assert widths == (longest, longest), (
            f"after this step the longest request has {longest} tokens: the longest context, and "
            "the width of the mask"
        )


def test_a_prompt_token_sees_itself_and_what_is_before_it() -> None:
    """Prompts of one token, too: they look like a decode, but have no past."""
    for prompts in (PROMPTS, ([11], [21])):
        inputs = prefill(*prompts)
        for i, prompt in enumerate(prompts):
            for token in range(len(prompt)):
                assert sees(inputs, i, token) == list(range(token + 1)), (
                    f"I2: token {token} of prompt {i} sees slots 0 to {token}"
                )


@pytest.mark.parametrize("computed", [(3, 7, 1), (5, 5), (1,), (1, 30)], ids=str)
def test_a_decode_sees_its_own_past_only(computed: tuple[int, ...]) -> None:
    """The slots after a short context contain tokens of an earlier owner of the row."""
    inputs = decode(*computed)
    for i, n in enumerate(computed):
        assert sees(inputs, i, 0) == list(range(n + 1)), (
            f"I2: request {i} of {computed} cached tokens sees slots 0 to {n}"
        )
