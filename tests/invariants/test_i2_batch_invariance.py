"""I2: a request's tokens do not depend on other requests or on the time of its arrival."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import RequestOutput, SamplingParams
from common.fast.cpu_kernels import kernels
from milestones.chain import chain
from tests.conftest import EngineFactory, build_engine, schedules
from tests.helpers.oracle import assert_one_answer, greedy, serve_arrivals

pytestmark = [pytest.mark.streams, pytest.mark.cpu]

bits = pytest.mark.skipif(kernels() is None, reason="torch chooses the order of a sum by shapes")
prompts = st.lists(st.integers(0, 255), min_size=1, max_size=24)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(-(2**63), 2**63 - 1),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
)
arrivals = st.lists(st.tuples(st.integers(0, 12), prompts, sampling), min_size=2, max_size=7)


@settings(max_examples=schedules(30))
@given(arrivals=arrivals, rows=st.integers(1, 4))
def test_company_changes_nothing(
    milestone: str, arrivals: list[tuple[int, list[int], SamplingParams]], rows: int
) -> None:
    """For random arrivals and parameters, each request gets the answer that it gets alone."""
    together = build_engine(milestone, max_num_seqs=rows)
    alone = build_engine(milestone, max_num_seqs=1)
    expected = {
        f"{i}": alone.generate(prompt, params)[0].outputs[0]
        for i, (_step, prompt, params) in enumerate(arrivals)
    }
    got = serve_arrivals(together, arrivals)
    for name, completion in expected.items():
        assert got[name].outputs[0].token_ids == completion.token_ids, f"I2: request {name}"
        assert got[name].outputs[0].text == completion.text
        assert got[name].outputs[0].finish_reason == completion.finish_reason


def rows_of(output: RequestOutput) -> list[dict[int, float]]:
    """Return the log probabilities of an output. Two are equal only if all their bits are."""
    rows = output.outputs[0].logprobs
    assert rows is not None
    return rows


@pytest.mark.since("m3_paged")  # m2 pads the contexts of a batch to one length
@bits
def test_company_changes_no_bit(make_engine: EngineFactory) -> None:
    """A difference in the last bit changes a text once in thousands of tokens."""
    params = greedy(12, logprobs=2, ignore_eos=True)
    prompts = [[1, 2, 3], [*range(4, 30)], [9, 8], [*range(40)], [7] * 5, [3, 1], [5, 5]]
    alone = [make_engine(max_num_seqs=1).generate(prompt, params)[0] for prompt in prompts]
    engine = make_engine(max_num_seqs=7)
    for count in (7, 3, 2):
        together = engine.generate(prompts[:count], params)
        assert [*map(rows_of, together)] == [*map(rows_of, alone[:count])], "I2: of the log probs"


@pytest.mark.since("m4_radix")
@bits
def test_a_cached_prefix_changes_no_bit(make_engine: EngineFactory) -> None:
    params, prompt = greedy(6, logprobs=2, ignore_eos=True), [*range(30)]
    engine = make_engine(page_size=4)
    for cached, length in ((0, 30), (28, 30), (20, 23)):
        fresh = make_engine(page_size=4).generate(prompt[:length], params)[0]
        found = engine.generate(prompt[:length], params)[0]
        assert found.metrics.num_cached_tokens == cached
        assert rows_of(found) == rows_of(fresh), "I2: of the log probabilities"


def test_greedy_rows_do_not_notice_sampling_neighbours(make_engine: EngineFactory) -> None:
    wild = SamplingParams(temperature=5.0, top_k=3, max_tokens=20, seed=1)
    sharp = SamplingParams(temperature=1e-6, top_p=0.01, max_tokens=20, seed=2)
    engine = make_engine(max_num_seqs=3)
    outputs = engine.generate([[1, 2, 3], [4, 5], [1, 2, 3]], [wild, greedy(20), sharp])
    assert_one_answer("tiny-llama", outputs[1], 20)
    # At a temperature of almost zero, sampling is greedy.
    assert_one_answer("tiny-llama", outputs[2], 20)


def test_a_seed_is_a_text(make_engine: EngineFactory) -> None:
    """A seed gives the same text on the same engine, on another engine, and in other batches."""
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=1234, ignore_eos=True)
    first, again = make_engine(max_num_seqs=4), make_engine(max_num_seqs=2)
    text = first.generate("abc", params)[0].outputs[0].token_ids
    assert first.generate("abc", params)[0].outputs[0].token_ids == text
    in_company = again.generate(["xyz", "abc", "a longer one"], params)[1]
    assert in_company.outputs[0].token_ids == text


def test_other_seeds_are_other_texts(make_engine: EngineFactory) -> None:
    engine = make_engine()
    params = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True) for seed in range(8)]
    texts = {tuple(o.outputs[0].token_ids) for o in engine.generate([[1, 2]] * 8, params)}
    assert len(texts) == 8


def test_without_a_seed_each_request_draws_its_own(make_engine: EngineFactory) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    engine, other = make_engine(), make_engine()
    outputs = engine.generate([[1, 2]] * 4, params) + other.generate([[1, 2]] * 4, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 8


def test_the_engines_seed_makes_a_run_repeatable(make_engine: EngineFactory) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    runs = [
        [o.outputs[0].token_ids for o in make_engine(seed=7).generate([[1, 2]] * 4, params)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


@pytest.mark.since("m2_continuous")
@pytest.mark.before("kv_quant")  # its cache rounds
def test_every_milestone_samples_the_same_text(milestone: str) -> None:
    """Greedy or sampled, the milestone below gives the same answer."""
    random_ids = random.Random(0)
    prompts = [[random_ids.randrange(256) for _ in range(n)] for n in (1, 3, 9, 30, 12, 5)]
    params = [
        SamplingParams(max_tokens=16, temperature=t, seed=i, top_p=0.95, ignore_eos=True)
        for i, t in enumerate([0.0, 0.7, 1.0, 1.3, 0.0, 1.0])
    ]
    upper = build_engine(milestone, max_num_seqs=4).generate(prompts, params)
    lower = build_engine(chain(milestone)[-2]).generate(prompts, params)
    assert [o.outputs for o in upper] == [o.outputs for o in lower]


def test_a_row_used_again_does_not_remember(make_engine: EngineFactory) -> None:
    """A short request gives its own answer in the memory of a long request before it."""
    engine = make_engine(max_num_seqs=1)
    engine.generate([list(range(100))], greedy(50))
    assert_one_answer("tiny-llama", engine.generate([[3, 4]], greedy(30))[0], 30)
