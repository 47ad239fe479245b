"""Penalties, `logit_bias` and `min_tokens`: their formulas, and I2 on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import EngineConfig, LLMEngine, Request, SamplingParams
from common.hf.tiny import byte_tokenizer
from common.sampling.adjustments import Adjustments, adjust
from common.sampling.sampler import SamplingMetadata, sample
from common.text.output_text import OutputText
from common.tracing.forced_retractions import force_retractions
from milestones.lab.instruments.audit import MODES, assert_idle, audited_engine_class
from milestones.lab.instruments.hash_model import hash_model
from tests.conftest import EngineFactory, build_engine
from tests.exercises.by_hand import request_with
from tests.helpers.oracle import greedy, serve_arrivals
from tests.helpers.sampling_reference import adjusted, hash_answer

pytestmark = pytest.mark.streams(electives=False)

HASH = hash_model()
TOKENIZER = byte_tokenizer()
VOCAB = 40  # of the tests without an engine
EOS = [3, 7]

penalties = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, 2.0, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3, 2.0, -1.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 100.0, 0.01]),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
    }
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
states = st.lists(st.tuples(tokens.filter(bool), tokens, penalties), min_size=1, max_size=5)


def request(prompt: list[int], output: list[int], params: SamplingParams) -> Request:
    ends = np.array(sorted({*EOS, *params.stop_token_ids}), dtype=np.int64)
    made = request_with(params, prompt, end_token_ids=ends)
    made.token_ids += output
    return made


@settings(max_examples=100)
@given(states=states, seed=st.integers(0, 1000))
def test_adjusted_logits_have_the_bits_of_the_reference(states: list[Any], seed: int) -> None:
    """Each row of a mixed batch gets the numbers that it gets alone, in plain NumPy."""
    logits = torch.randn(len(states), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    requests = [request(p, o, SamplingParams(**values)) for p, o, values in states]
    before = logits.clone()
    adjustments = Adjustments.from_requests(requests, "cpu")
    got = logits if adjustments is None else adjust(logits, adjustments)
    for row, (prompt, output, _) in enumerate(states):
        expected = adjusted(logits[row].tolist(), prompt, output, requests[row].params, EOS)
        assert got[row].tolist() == expected.tolist(), f"I2: row {row}"
    assert torch.equal(logits, before), "the logits of the model were changed"


def test_one_step_by_hand() -> None:
    """Prompt 1 1 2, output 3 3. The logits have both signs."""
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={4: 10.0}
    )
    requests = [request([1, 1, 2], [3, 3], params)]
    logits = torch.tensor([[1.0, -1.0, 3.0, 4.0, -4.0, 0.0, 0.0, 0.0]])
    adjustments = Adjustments.from_requests(requests, "cpu")
    assert adjustments is not None
    # Token 1: -1 * 2. Token 2: 3 / 2. Token 3: 4 / 2 - 2 * 0.25 - 0.5. Token 4: -4 + 10.
    assert adjust(logits, adjustments)[0].tolist() == [1, -2, 1.5, 1, 6, 0, 0, 0]


def test_a_batch_without_penalties_has_no_adjustments() -> None:
    params = [SamplingParams(), greedy(5), SamplingParams(top_p=0.5), SamplingParams(logit_bias={})]
    done = request([1], [2, 2, 2], SamplingParams(min_tokens=3))
    requests = [*[request([1, 2], [3], p) for p in params], done]
    assert SamplingMetadata.from_requests(requests, "cpu").adjustments is None


def test_a_placeholder_is_never_counted() -> None:
    unresolved = request([1, 2], [5, -1], SamplingParams(presence_penalty=1.0))
    metadata = SamplingMetadata.from_requests([unresolved], "cpu")
    with pytest.raises(AssertionError, match="I2: a penalty counts a placeholder"):
        sample(torch.zeros(1, VOCAB), metadata)


def test_the_array_of_tokens_follows_the_list() -> None:
    """A placeholder becomes a token, or is undone, and the array is the same as the list."""
    grown = request([1, 2], [], SamplingParams())
    for step in range(40):
        grown.token_ids.append(-5)
        assert grown.token_array().tolist() == grown.token_ids
        grown.token_ids.pop()
        if step % 3:
            grown.token_ids.append(step)
        assert grown.token_array().tolist() == grown.token_ids


def test_log_probabilities_are_those_of_the_model() -> None:
    """They are computed before bias, penalties, `min_tokens` and temperature."""
    params = SamplingParams(
        logprobs=3, temperature=0.5, logit_bias={9: 100.0}, presence_penalty=1.0, min_tokens=4
    )
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    metadata = SamplingMetadata.from_requests([request([1], [2], params)], "cpu")
    ((token, logprobs),) = sample(logits, metadata).rows()
    assert token == 9 and logprobs is not None
    expected = logits[0].log_softmax(-1)
    assert logprobs == {t: float(expected[t]) for t in [9, *expected.topk(3).indices.tolist()]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_only_a_row_without_a_distribution_is_invalid(bad: float) -> None:
    """NaN and inf are found although `min_tokens` hides their token; so is a row of only -inf."""
    logits = torch.zeros(3, VOCAB)
    logits[1, EOS] = bad
    if bad < 0:
        logits[1, [t for t in range(VOCAB) if t not in EOS]] = bad
        logits[1, EOS] = 0.0
    params = [SamplingParams(min_tokens=1, seed=i) for i in range(3)]
    metadata = SamplingMetadata.from_requests([request([1], [], p) for p in params], "cpu")
    assert sample(logits, metadata).is_valid.tolist() == [True, False, True]


engine_params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(6, 14),
        "temperature": st.sampled_from([0.0, 0.0, 1.0, 2.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "presence_penalty": st.sampled_from([0.0, 2.0, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 2.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.5, 0.5]),
        "logit_bias": st.sampled_from([None, None, {5: 8.0, 6: 8.5, 7: 8.25}, {0: 9.0, 1: 9.0}]),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.sampled_from([(), (5,), (0, 6)]),
    }
)
plain_params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 10),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.just(3),
    }
)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 8),
        st.lists(st.integers(1, 250), min_size=1, max_size=9),
        engine_params | engine_params | plain_params,
    ),
    min_size=2,
    max_size=5,
)


def modes_of(milestone: str) -> tuple[str, ...]:
    """Return how forwards run on this engine: only the overlap engine has more than one way."""
    return MODES if milestone == "m5_overlap" else ("overlap",)


def hash_engine(milestone: str, mode: str, **config: Any) -> LLMEngine:
    config = {"enable_overlap": mode != "serial", "max_model_len": 64, **config}
    settings = EngineConfig(model="hash-model", device="cpu", **config)
    return audited_engine_class(milestone, mode)(settings, HASH)


@settings(max_examples=16)
@given(
    arrivals=arrivals,
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 4),
    budget=st.sampled_from([1, 3, 64]),
    every=st.sampled_from([None, 2, 3]),
)
def test_penalties_on_every_engine(
    milestone: str, arrivals: list[Any], mode: str, rows: int, budget: int, every: int | None
) -> None:
    """I2: chunks, retractions, neighbours and overlap change no count. The reference has none."""
    is_paged = milestone not in ("m1_single", "m2_continuous")
    config = {"max_num_batched_tokens": budget, "page_size": 4} if is_paged else {}
    made = [(step, prompt, SamplingParams(**values)) for step, prompt, values in arrivals]
    expected = {
        f"{i}": hash_answer(prompt, params, HASH.eos_token_ids)
        for i, (_, prompt, params) in enumerate(made)
    }
    engine = hash_engine(milestone, mode, max_num_seqs=rows, **config)
    force_retractions(engine.core.scheduler, every if is_paged else None)
    finals = serve_arrivals(engine, made)
    got = {name: output.outputs[0].token_ids for name, output in finals.items()}
    assert got == expected, f"I2: {mode}"
    engine.close()
    assert_idle(engine)


def test_each_token_counts_in_the_next_step(milestone: str) -> None:
    """With overlap, the newest token is counted although the host does not know it."""
    for mode in modes_of(milestone):
        with hash_engine(milestone, mode) as engine:
            bias = dict.fromkeys(range(10, 20), 50.0)
            params = greedy(8, logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0)
            (output,) = engine.generate([[1, 2, 3]], params)
            assert len(set(output.outputs[0].token_ids)) == 8, f"I2: {mode}"


def test_min_tokens_suppresses_every_end(make_engine: EngineFactory) -> None:
    """A bias towards the end of sequence and a stop token ends the output at `min_tokens` + 1."""
    engine = make_engine()
    eos = min(engine.loaded.eos_token_ids)
    for end, params in [(eos, {}), (65, {"stop_token_ids": [65]})]:
        early = engine.generate([1], greedy(9, logit_bias={end: 100.0}, **params))[0].outputs[0]
        late = engine.generate([1], greedy(9, logit_bias={end: 100.0}, min_tokens=5, **params))
        assert early.token_ids == [end] and early.finish_reason == "stop"
        ended = late[0].outputs[0]
        assert ended.token_ids.index(end) == 5 and len(ended.token_ids) == 6
        assert ended.finish_reason == "stop"


@given(
    text=st.text("abc", max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
)
def test_stop_strings_before_min_tokens_do_not_end_the_text(
    text: str, stop: list[str], min_tokens: int
) -> None:
    """A stop string ends the text where it is complete after more than `min_tokens` tokens.

    Text that was visible is never taken back (I6).
    """
    params = SamplingParams(max_tokens=20, stop=stop, min_tokens=min_tokens)
    output, seen, ended = OutputText(TOKENIZER, params), "", None
    for count, token in enumerate(TOKENIZER.encode(text), 1):
        is_end = output.append(token)
        assert output.visible.startswith(seen), "I6: visible text was taken back"
        seen = output.visible
        if is_end:
            ended = count
            break
    ends = [e for e in range(min_tokens + 1, len(text) + 1) if text[:e].endswith(tuple(stop))]
    assert ended == (ends[0] if ends else None)
    if ended is not None:
        longest = max(len(s) for s in stop if text[:ended].endswith(s))
        assert output.visible == text[: ended - longest]
    elif min_tokens <= len(text):
        assert not output.finish() and output.visible == text


def test_a_bias_of_the_caller_may_change_later() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 5.0
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))


def test_parameters_that_this_model_cannot_serve(milestone: str) -> None:
    with build_engine(milestone) as engine:
        with pytest.raises(ValueError, match="logit_bias holds 259, outside the vocabulary"):
            engine.add_request([1], SamplingParams(logit_bias={259: 1.0}))
        with pytest.raises(ValueError, match="min_tokens=1 .* all 259 tokens"):
            engine.add_request([1], SamplingParams(min_tokens=1, stop_token_ids=range(259)))
        assert not engine.has_unfinished_requests()
