"""m1.4: when something goes wrong. `EngineCore.step`, `finish`, `send_back`; the whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from common import SamplingParams
from common.engine_core import ForwardError
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import build_engine
from tests.exercises.by_hand import Broken, break_next_forward, break_next_rows, names
from tests.helpers.oracle import assert_one_answer, drain, greedy

PROMPTS = [[7], list(range(40, 57)), [5] * 9]


def make_engine(**config: Any) -> Any:
    """Return an engine on tiny-llama, which is audited after each step."""
    engine: Any = build_engine("m1_single", **config)
    assert engine.core.step() == [], "without a request a step computes nothing"
    assert engine.stats().num_steps == 0, "an empty step is not counted"
    return engine


def test_a_step_gives_a_token() -> None:
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(7), "A")
    (output,) = engine.core.step()
    request = output.request
    got = request.request_id, request.num_tokens, request.num_computed_tokens
    assert got == ("A", 4, 3), "A computes its 3 prompt tokens and gets a fourth token"
    engine.close()


def test_a_request_that_has_ended_holds_nothing() -> None:
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(1), "A")
    engine.add_request([5, 6], greedy(4), "B")
    engine.core.step()
    held = names(engine.core.runner.past_key_values)
    assert held == "none", "I3: A has ended, but keys and values are still held"
    engine.close()


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


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_failed_forward_leaves_no_half_written_cache(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """KeyboardInterrupt is no `Exception`, and it can come in the middle of a forward too."""
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(7), "A")
    engine.core.step()
    request = engine.output_processor.requests["A"]
    break_next_forward(engine, monkeypatch, error)
    with pytest.raises((ForwardError, error)):
        engine.core.step()
    cache = engine.core.runner.past_key_values.get(request)
    lengths = {0} if cache is None else {layer.get_seq_length() for layer in cache.layers}
    assert lengths == {request.num_computed_tokens}, (
        "I1: each layer must have keys and values of `num_computed_tokens` tokens"
    )
    engine.close()


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_after_a_failed_forward_a_request_waits_again(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    engine = make_engine()
    for name in "AB":
        engine.add_request([1, 2, 3], greedy(7), name)
    engine.core.step()
    request = engine.output_processor.requests["A"]
    tokens = list(request.token_ids)
    break_next_forward(engine, monkeypatch, error)
    with pytest.raises((ForwardError, error)) as caught:
        engine.core.step()
    assert isinstance(caught.value, ForwardError), "the shell must get a ForwardError"
    got = names(caught.value.requests), type(caught.value.error)
    assert got == ("A", error), "the shell searches these requests for the one that fails"
    scheduler = engine.core.scheduler
    queues = names(scheduler.running), names(scheduler.waiting)
    assert queues == ("none", "A B"), "I5: A came before B, and waits before B"
    assert request.token_ids == tokens, "A keeps its tokens"
    engine.close()


def test_reading_the_tokens_is_part_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, `run` returns before the forward has ended: its error comes with the tokens."""
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(7), "A")
    break_next_rows(engine, monkeypatch)
    with pytest.raises((ForwardError, Broken)) as caught:
        engine.core.step()
    assert isinstance(caught.value, ForwardError), (
        "I3: `rows()` failed, and the shell must get a ForwardError; A still "
        + ("runs" if engine.core.scheduler.running else "waits")
    )
    engine.close()


def test_abort_says_whether_it_ended_something() -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(8), "A")
    engine.step()
    got = [engine.abort_request(name) for name in "AAB"]
    assert got == [True, False, False], "only the first call ended a live request; B never existed"
    drain(engine)
    engine.add_request([1, 2], greedy(1), "A")
    engine.step()
    assert not engine.abort_request("A"), "A has already finished"
    assert_idle(engine)


@pytest.mark.parametrize("victim", ["running", "waiting"])
def test_an_aborted_request_gets_one_final_output(victim: str) -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(4, ignore_eos=True), "running")
    engine.add_request([3, 4], greedy(4, ignore_eos=True), "waiting")
    engine.step()
    engine.abort_request(victim)
    other = "waiting" if victim == "running" else "running"
    queued = names([*engine.core.scheduler.running, *engine.core.scheduler.waiting])
    assert queued == other, f"I3: {victim} was aborted"
    finals = {
        name: [output.outputs[0].finish_reason for output in outputs if output.finished]
        for name, outputs in drain(engine).items()
    }
    assert finals == {victim: ["abort"], other: ["length"]}, "each request gets one final output"
    assert_idle(engine)


def test_an_aborted_request_keeps_what_it_had() -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(8, ignore_eos=True), "A")
    engine.step()
    before = engine.step()[0].outputs[0].token_ids
    engine.abort_request("A")
    (final,) = engine.step()
    assert final.outputs[0].token_ids == before, "the final output has all tokens before the abort"


def test_a_request_that_has_ended_stays_as_it_is() -> None:
    """The shell may call `finish` for a request that its own last token has ended."""
    engine = make_engine()
    engine.add_request([1, 2], greedy(1), "A")
    request = engine.output_processor.requests["A"]
    engine.core.step()
    try:
        engine.core.finish(request, "abort")
    except ValueError as error:
        pytest.fail(f"A has ended and is in no queue, so `finish` has nothing to do, not: {error}")
    assert request.finish_reason == "length", "A ended by length before `finish` was called"
    engine.close()


def test_one_answer_for_all() -> None:
    """Requests run in order of arrival, and get the tokens of Hugging Face."""
    engine = make_engine()
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(8), f"{i}")
    outputs = drain(engine)
    assert list(outputs) == ["0", "1", "2"], "I5: first come, first served"
    for name in outputs:
        assert_one_answer("tiny-llama", outputs[name][-1], 8)
    assert_idle(engine)


def test_a_sampled_answer_is_the_same_again() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=5)
    first, second = (make_engine().generate([PROMPTS[1]], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids, (
        "I2: a draw depends only on logits, seed and position"
    )


def test_the_cache_turns_a_square_into_a_line() -> None:
    """The lesson, counted: 20 prompt and 12 output tokens. 31 are computed; without a cache 306."""
    engine = make_engine()
    engine.generate([list(range(20))], greedy(12, ignore_eos=True))
    stats = engine.stats()
    computed = stats.prefill_tokens + stats.decode_tokens
    assert computed == 31, "20 + 11: each token is computed once, the last one never"
