"""m1.4: when something goes wrong. `LLMEngine.run` and `abort_request`; then the whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from common import SamplingParams
from common.guard import ForwardError
from m1_single.schedule_batch import ScheduleBatch
from milestones.instruments.audit import assert_idle
from tests.conftest import build_engine
from tests.exercises.by_hand import make_request, names
from tests.helpers.oracle import assert_one_answer, drain, greedy

PROMPTS = [[7], list(range(40, 57)), [5] * 9]


class Broken(Exception):
    """The error of a forward that these tests make fail."""


def make_engine(**config: Any) -> Any:
    """Return an engine on tiny-llama, which is audited after each step."""
    engine: Any = build_engine("m1_single", **config)
    assert engine.abort_request("unknown") is False, "there is no request with this id"
    return engine


def break_next_forward(
    engine: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = Broken
) -> None:
    """Let the next forward fail in layer 1, after layer 0 has stored its keys and values."""
    layer = engine.loaded.model.model.layers[1]
    forward = layer.forward

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(layer, "forward", forward)
        raise error

    monkeypatch.setattr(layer, "forward", fail)


def test_a_step_gives_a_token_for_each_request() -> None:
    engine = make_engine()
    request = make_request("A", [1, 2, 3])
    result = engine.run(ScheduleBatch([request], [3]))
    assert len(result) == 1 and isinstance(result[0][0], int), (
        f"one request gets one pair (token id, logprobs), not {result}"
    )


@pytest.mark.parametrize("step", [0, 1, 4])
def test_after_a_failed_forward_a_request_goes_on(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The next step computes all tokens again, and the answer is the same as without a failure."""
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(7), "A")
    for _ in range(step):
        engine.step()
    break_next_forward(engine, monkeypatch)
    assert engine.step() == [], "the forward failed: no request got a token"
    engine.check_invariants()
    (outputs,) = drain(engine).values()
    assert_one_answer("tiny-llama", outputs[-1], 7)
    assert_idle(engine)


def test_ctrl_c_in_a_forward_leaves_no_half_written_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KeyboardInterrupt is no `Exception`, and it can come in the middle of a forward too."""
    engine = make_engine()
    request = make_request("A", [1, 2, 3])
    break_next_forward(engine, monkeypatch, KeyboardInterrupt)
    with pytest.raises(ForwardError):
        engine.run(ScheduleBatch([request], [3]))
    assert request not in engine.core.runner.past_key_values, "I1: layer 0 has stored three tokens"
    assert request.num_computed_tokens == 0


def test_a_failed_forward_leaves_no_half_written_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(7), "A")
    engine.step()
    break_next_forward(engine, monkeypatch)
    engine.step()
    request = engine.output_processor.requests["A"]
    cache = engine.core.runner.past_key_values.get(request)
    lengths = {0} if cache is None else {layer.get_seq_length() for layer in cache.layers}
    assert lengths == {request.num_computed_tokens}, (
        f"I1: num_computed_tokens is {request.num_computed_tokens}, but the layers have "
        f"keys and values of {sorted(lengths)} tokens"
    )
    engine.close()


def test_abort_says_whether_it_ended_something() -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(8), "A")
    engine.step()
    got = [engine.abort_request("A"), engine.abort_request("A"), engine.abort_request("B")]
    assert got == [True, False, False], (
        f"only the first call ended a live request; B never existed: {got}"
    )
    drain(engine)
    assert_idle(engine)


@pytest.mark.parametrize("victim", ["running", "waiting"])
def test_an_aborted_request_gets_one_final_output(victim: str) -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(4, ignore_eos=True), "running")
    engine.add_request([3, 4], greedy(4, ignore_eos=True), "waiting")
    engine.step()
    engine.abort_request(victim)
    assert names(engine.output_processor.requests.values()) == (
        "waiting" if victim == "running" else "running"
    ), f"I3: {victim} was aborted and must be removed"
    outputs = drain(engine)
    finals = {
        n: [o.outputs[0].finish_reason for o in os if o.finished] for n, os in outputs.items()
    }
    other = "waiting" if victim == "running" else "running"
    assert finals == {victim: ["abort"], other: ["length"]}, (
        f"each request gets one final output: {finals}"
    )
    assert_idle(engine)


def test_an_aborted_request_keeps_what_it_had() -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(8, ignore_eos=True), "A")
    engine.step()
    before = engine.step()[0].outputs[0].token_ids
    engine.abort_request("A")
    (final,) = engine.step()
    assert final.outputs[0].token_ids == before, (
        f"the output before was {before}; {final.outputs[0]}"
    )


def test_a_finished_request_cannot_be_aborted() -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(1), "A")
    engine.step()
    assert engine.abort_request("A") is False, "A has already finished"


def test_one_answer_for_all() -> None:
    """Requests run in order of arrival, and get the tokens of Hugging Face."""
    engine = make_engine()
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(8), f"{i}")
    outputs = drain(engine)
    assert list(outputs) == ["0", "1", "2"], f"I5: first come, first served, not {list(outputs)}"
    for name in outputs:
        assert_one_answer("tiny-llama", outputs[name][-1], 8)
    assert_idle(engine)


def test_a_sampled_answer_is_the_same_again() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=5)
    first, second = (make_engine().generate([PROMPTS[1]], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids, (
        f"I2: a draw depends only on logits, seed, position: {first.outputs}, {second.outputs}"
    )


def test_the_cache_turns_a_square_into_a_line() -> None:
    """The lesson, counted: 20 prompt and 12 output tokens. 31 are computed; without a cache 306."""
    engine = make_engine()
    engine.generate([list(range(20))], greedy(12, ignore_eos=True))
    stats = engine.stats()
    got = stats.prefill_tokens + stats.decode_tokens
    assert got == 31, f"20 + 11: each token is computed once, the last one never; computed {got}"
