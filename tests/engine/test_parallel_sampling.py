"""Requests with n > 1: one request id, n outputs, on every engine."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import LLMEngine, RequestOutput, SamplingParams
from common.request import child_seed
from tests.conftest import EngineFactory, build_engine
from tests.helpers.oracle import assert_one_answer, drain, greedy

pytestmark = pytest.mark.streams(electives=False)


def sampled(n: int, max_tokens: int = 6, **values: Any) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, **values)


def alone(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """Return the tokens of each output, from requests with n=1 and documented seeds."""
    assert params.seed is not None
    singles = [params.of_child(child_seed(params.seed, i)) for i in range(params.n)]
    outputs = engine.generate([prompt] * params.n, singles)
    return [output.outputs[0].token_ids for output in outputs]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


def test_an_output_has_n_different_answers(make_engine: EngineFactory) -> None:
    """Output i is the one of seed + i, the same in each run, and different from the others."""
    params, prompt = sampled(3, seed=2**63 - 2, temperature=1.5), [1, 2, 3]
    engine = make_engine()
    (output,) = engine.generate([prompt], params)
    assert output.finished and len({tuple(tokens) for tokens in tokens_of(output)}) == 3
    assert tokens_of(output) == alone(make_engine(), prompt, params)
    assert tokens_of(engine.generate([prompt], params)[0]) == tokens_of(output)
    assert {c.finish_reason for c in output.outputs} == {"length"}
    assert output.prompt_token_ids == prompt
    metrics = output.metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_without_a_seed_the_answers_differ_too(make_engine: EngineFactory) -> None:
    outputs = make_engine().generate([[1, 2]] * 2, sampled(3, 16, temperature=2.0))
    assert len({tuple(tokens) for output in outputs for tokens in tokens_of(output)}) == 6


def test_greedy_answers_are_equal(make_engine: EngineFactory) -> None:
    output = make_engine().generate("abc", greedy(5, n=2))[0]
    assert_one_answer("tiny-llama", output, 5)
    assert output.outputs[0].token_ids == output.outputs[1].token_ids
    assert output.prompt == "abc"


def test_one_final_output_after_the_last_child(make_engine: EngineFactory) -> None:
    """The children end in different steps. Each keeps its output until the last one has ended."""
    engine = make_engine(max_num_seqs=2)
    params = sampled(4, 12, seed=1, temperature=2.0, stop_token_ids=range(0, 259, 4))
    name = engine.add_request([1, 2], params, "p")
    assert name == "p"
    history = drain(engine)
    assert set(history) == {"p"}, "the outputs of children must not be returned"
    assert [o.finished for o in history["p"]] == [False] * (len(history["p"]) - 1) + [True]
    lengths = [len(tokens) for tokens in tokens_of(history["p"][-1])]
    assert len(set(lengths)) > 1, "the test needs children that end in different steps"
    for earlier, later in zip(history["p"], history["p"][1:], strict=False):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.text.startswith(before.text), "I6: streamed text was taken back"
            assert before.finish_reason in (None, after.finish_reason)
    assert all(c.finish_reason for c in history["p"][-1].outputs)


def test_a_stream_has_all_outputs(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=3)
    params = sampled(3, 5, seed=8)
    outputs = list(engine.stream([4, 5], params))
    assert [o.finished for o in outputs].count(True) == 1 and outputs[-1].finished
    assert all(len(o.outputs) == 3 for o in outputs)
    assert tokens_of(outputs[-1]) == alone(engine, [4, 5], params)
    stream = engine.stream([4, 5], sampled(3, 50, seed=8))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    engine.step()
    assert not engine.has_unfinished_requests(), "I3: a dropped stream left children behind"


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_all_children(make_engine: EngineFactory, steps: int) -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add_request([9, 8], greedy(9), "other")
    engine.add_request([1, 2], sampled(3, 30, seed=5), "p")
    early = [output for _ in range(steps) for output in engine.step()]
    assert engine.abort_request("p")
    assert not engine.abort_request("p"), "the request has ended"
    history = drain(engine)
    final = history["p"]
    assert len(final) == 1 and final[0].finished and not any(o.finished for o in early)
    assert {c.finish_reason for c in final[0].outputs} == {"abort"}
    assert_one_answer("tiny-llama", history["other"][-1], 9)


def test_an_abort_after_some_children_have_ended(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request([1, 2], sampled(2, 3, seed=5), "p")
    output = None
    while output is None or output.outputs[0].finish_reason is None:
        output = next((o for o in engine.step() if o.request_id == "p"), output)
    assert engine.abort_request("p")
    (final,) = drain(engine)["p"]
    assert [c.finish_reason for c in final.outputs] == ["length", "abort"]
    assert len(final.outputs[0].token_ids) == 3


def test_ids_are_in_use_until_the_final_output(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.add_request([1], sampled(2, 2), "p")
    for busy in ("p", "0_p", "1_p"):
        with pytest.raises(ValueError, match="belongs to a request not yet finished"):
            engine.add_request([1], greedy(1), busy)
    with pytest.raises(ValueError, match="'p' belongs to a request not yet finished"):
        engine.add_request([1], sampled(2, 2), "p")
    drain(engine)
    engine.add_request([1], sampled(2, 2), "p")
    drain(engine)


def test_a_refused_child_leaves_no_sibling(make_engine: EngineFactory) -> None:
    """The id of the second child is in use, so the request is refused as a whole (I4)."""
    engine = make_engine()
    engine.add_request([1, 2], greedy(4), "1_p")
    with pytest.raises(ValueError, match="'1_p' belongs to a request not yet finished"):
        engine.add_request([1], sampled(3), "p")
    engine.check_invariants()
    assert set(drain(engine)) == {"1_p"}
    with pytest.raises(ValueError, match="prompt must not be empty"):
        engine.add_request([], sampled(3), "p")
    assert not engine.has_unfinished_requests()


def test_a_child_that_fails_ends_alone(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> bool:
        raise RuntimeError("this child cannot be decoded")

    engine = make_engine()
    engine.add_request([1, 2], sampled(3, 5, seed=5), "p")
    monkeypatch.setattr(engine.output_processor.requests["1_p"].text, "append", fail)
    final = drain(engine)["p"][-1]
    assert [c.finish_reason for c in final.outputs] == ["length", "error", "length"]
    assert final.finished and "cannot be decoded" in (final.outputs[1].error or "")
    whole = alone(engine, [1, 2], sampled(3, 5, seed=5))
    assert [tokens_of(final)[0], tokens_of(final)[2]] == [whole[0], whole[2]]


def test_the_ids_of_children_have_the_limit_of_ids(make_engine: EngineFactory) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="request_id must have at most 1000 characters, got 1002"):
        engine.add_request([1], sampled(2), "p" * 1000)
    assert not engine.has_unfinished_requests()


def test_closing_aborts_all_children(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.add_request([1, 2], sampled(3, 40), "p")
    engine.step()
    engine.close()
    assert not engine.has_unfinished_requests(), "I3: a child is left"
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.add_request([1], sampled(2))


def test_other_outputs_are_kept_during_generate(make_engine: EngineFactory) -> None:
    """A request with n > 1 that finishes while another caller waits is not lost."""
    engine = make_engine(max_num_seqs=3)
    engine.add_request([1, 2], sampled(2, 2, seed=3), "p")
    engine.generate([[5]], greedy(12))
    (final,) = [o for o in drain(engine)["p"] if o.finished]
    assert tokens_of(final) == alone(engine, [1, 2], sampled(2, 2, seed=3))


@pytest.mark.since("m4_radix")
def test_the_prompt_is_computed_once(make_engine: EngineFactory) -> None:
    engine, prompt = make_engine(page_size=4, max_num_seqs=8), list(range(33))
    (output,) = engine.generate([prompt], sampled(4, seed=1))
    stats = engine.stats()
    assert stats.prefill_tokens == 33 + 3, "the other children compute their last token only"
    assert stats.cached_prompt_tokens == 3 * 32
    assert output.metrics.num_cached_tokens == 0


@settings(max_examples=8)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 6), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 100),
)
def test_random_arrivals_and_aborts(
    milestone: str, requests: list[tuple[int, int, int, bool]], seed: int
) -> None:
    """Each request gets one final output, with the answers of its children alone (I2, I3)."""
    chance = random.Random(seed)
    engine, single = build_engine(milestone, max_num_seqs=3), build_engine(milestone)
    plans = {
        f"{i}": (arrival, [1 + i, 2], sampled(n, length, seed=i), aborted)
        for i, (arrival, n, length, aborted) in enumerate(requests)
    }
    final: dict[str, RequestOutput] = {}
    for step in range(200):
        if len(final) == len(plans):
            break
        for name, (arrival, prompt, params, aborted) in plans.items():
            if arrival == step:
                engine.add_request(prompt, params, name)
            if aborted and chance.random() < 0.3:
                engine.abort_request(name)
        for output in engine.step():
            assert output.request_id not in final, "I3: an output after the final one"
            if output.finished:
                final[output.request_id] = output
    assert set(final) == set(plans) and not engine.has_unfinished_requests()
    for name, (_, prompt, params, aborted) in plans.items():
        for got, whole in zip(tokens_of(final[name]), alone(single, prompt, params), strict=True):
            assert got == whole[: len(got)] and (aborted or len(got) == len(whole))
    engine.close()
