"""The soak's plans and expected answers, computed without an engine."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from common import SamplingParams
from common.sampling.sampler import uniform
from milestones.lab.instruments import hash_chain
from milestones.lab.soak import faults
from milestones.lab.soak.answers import HashSource
from milestones.lab.soak.extras import EXTRAS, GRAMMARS, PLAIN
from milestones.lab.soak.plan import PAGE_SIZES, make_plan
from milestones.lab.soak.tiny_answers import Sources
from tests.conftest import build_engine
from tests.helpers.oracle import greedy, reference


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def test_the_seed_decides_the_schedule(sources: Sources) -> None:
    plans = [repr(make_plan(1, number, sources)) for number in range(6)]
    assert plans == [repr(make_plan(1, number, sources, "m5_overlap")) for number in range(6)]
    others = [repr(make_plan(2, number, sources)) for number in range(6)]
    assert len({*plans, *others}) == 12


def test_the_random_numbers_of_the_sampler() -> None:
    """The soak's random numbers, in plain Python, have the same bits as the sampler's."""
    chance = random.Random(0)
    cases = [(chance.getrandbits(64) - 2**63, chance.randrange(5000)) for _ in range(200)]
    cases += [(0, 0), (-(2**63), 1), (2**63 - 1, 2**31)]
    seeds, positions = (torch.tensor(column) for column in zip(*cases, strict=True))
    expected = uniform(seeds, positions).tolist()
    assert [hash_chain.uniform(*case) for case in cases] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"min_p": 0.05}], ids=str)
def test_the_answers_of_the_hash_model(temperature: float, filters: dict[str, Any]) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=temperature, seed=5, logprobs=0, ignore_eos=True, **filters
    )
    source = HashSource()
    engine = build_engine("m1_single", source.loaded)
    for prompt in ([5], [1, 2, 3], [250] * 17):
        expected = source.continuation(prompt, params, 20)
        got = engine.generate(prompt, params)[0].outputs[0]
        assert len(expected.token_ids) == 20 and got.token_ids == expected.token_ids
        chosen = [row[t] for row, t in zip(got.logprobs or [], got.token_ids, strict=True)]
        assert chosen == pytest.approx(expected.logprobs, abs=1e-5)
    engine.close()


def test_the_answers_of_a_tiny_model(sources: Sources) -> None:
    """Greedy answers are those of Hugging Face's `generate`, up to the first tie of logits."""
    prompt = [3, 1, 4, 1, 5]
    tokens = sources["tiny-llama"].continuation(prompt, greedy(12), 12).token_ids
    assert len(tokens) > 4
    assert tokens == reference("tiny-llama", tuple(prompt), 12).token_ids[: len(tokens)]


def test_where_an_answer_ends(sources: Sources) -> None:
    source = sources["hash"]
    ids = [ord(c) - ord("!") for c in "abcdef"]  # ids of the byte tokenizer
    text = source.text_of(ids, SamplingParams())
    assert source.ending(ids, greedy(6)).finish_reason == "length"
    assert source.ending(ids, greedy(6), limit=2).token_ids == ids[:2]
    stopped = source.ending(ids, greedy(6, stop=text[2:4]))
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == (text[:2], ids[:4], "stop")
    by_token = source.ending(ids, greedy(6, stop_token_ids=[ids[3]]))
    assert (by_token.text, by_token.token_ids) == (text[:3], ids[:4])


@pytest.mark.thorough("hundreds of plans", fast_on=("m5_overlap",))
def test_plans_draw_what_an_elective_adds(milestone: str, sources: Sources) -> None:
    """Together with n, page sizes from 1 to 64, and pools from barely enough to ample."""
    plans = [make_plan(3, number, sources, milestone) for number in range(80)]
    requests = [r for plan in plans for arrival in plan.arrivals for r in arrival.requests]
    assert {plan.config["page_size"] for plan in plans} == {*PAGE_SIZES}
    assert {len(r.answers) for r in requests} >= {1, 2, 3}
    for request in requests:
        assert all(answer.token_ids for answer in request.answers)
    extra = [request for request in requests if request.extra != PLAIN]
    adds = milestone in EXTRAS and (milestone != "structured_output" or find_spec("llguidance"))
    assert bool(extra) == bool(adds)
    assert len({repr(request.extra) for request in extra}) >= 4 or not extra


@pytest.mark.parametrize("params", [greedy(30), SamplingParams(max_tokens=30, seed=5)], ids=str)
def test_the_answers_under_a_grammar(params: SamplingParams) -> None:
    """Each answer is one of the strings of its grammar, and then an end token."""
    source, texts = HashSource(), set[str]()
    for wanted, strings in GRAMMARS.items():
        for prompt in ([5], [1, 2, 3], [250] * 17):
            asked = replace(params, structured_outputs=wanted)
            answer = source.continuation(prompt, asked, 30)
            text = source.ending(answer.token_ids, asked).text
            assert answer.is_whole and text in strings
            texts.add(text)
    assert len(texts) >= len(GRAMMARS) + (not params.is_greedy)


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        ({"logits_to_keep": 1}, [4]),
        ({"logits_to_keep": torch.tensor([1, 3])}, [1, 3]),
        ({"logits_to_keep": 0, "tokens_to_keep": torch.tensor([1, 3])}, [1, 3]),
        ({"logits_to_keep": 0, "tokens_to_keep": slice(-2, None)}, [3, 4]),
    ],
)
def test_a_row_of_logits_is_broken_where_its_token_is(
    kwargs: dict[str, Any], kept: list[int]
) -> None:
    """The pass that trims the last layer renames the tokens that get logits."""
    forward = {"input_ids": torch.zeros(1, 5, dtype=torch.int64), **kwargs}
    assert faults._kept_tokens(forward).tolist() == kept
