"""I3: a done, aborted or failed request leaves nothing behind, and ends exactly once."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import SamplingParams
from common.sampling.sampler import SamplerOutput
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import EngineFactory, build_engine, schedules, shared_model
from tests.helpers.oracle import assert_one_answer, drain, greedy
from tests.helpers.replaced import fail_forward

pytestmark = pytest.mark.streams

PROMPTS = [[7], [1, 2, 3], list(range(20)), [9, 8], list(range(60, 90))]


class Broken(Exception):
    pass


@functools.cache
def alone(milestone: str, i: int) -> list[int]:
    """Return the answer to the i-th prompt when no other request runs."""
    engine = build_engine(milestone)
    return engine.generate(PROMPTS[i], greedy(4 + 3 * i, ignore_eos=True))[0].outputs[0].token_ids


@settings(max_examples=schedules(40))
@given(
    aborts=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 4)), max_size=5),
    rows=st.integers(1, 5),
)
def test_abort_at_any_moment(milestone: str, aborts: list[tuple[int, int]], rows: int) -> None:
    """Requests are aborted while they wait, while they run, or when they are finished.

    Each request has one final output, and the answers of the other requests do not change.
    """
    engine = build_engine(milestone, max_num_seqs=rows)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(4 + 3 * i, ignore_eos=True), f"{i}")
    finals: dict[str, Any] = {}
    step = 0
    while engine.has_unfinished_requests():
        for when, who in aborts:
            if when == step:
                live = f"{who}" not in finals
                assert engine.abort_request(f"{who}") in ({True, False} if live else {False})
                assert not engine.abort_request(f"{who}"), "a request was aborted twice"
        for output in engine.step():
            assert output.request_id not in finals, "a request has an output after its final one"
            if output.finished:
                finals[output.request_id] = output
        step += 1
    assert_idle(engine)
    assert set(finals) == {str(i) for i in range(5)}
    for i in range(5):
        if finals[f"{i}"].outputs[0].finish_reason == "length":
            assert finals[f"{i}"].outputs[0].token_ids == alone(milestone, i)
        else:
            assert finals[f"{i}"].outputs[0].finish_reason == "abort"


def test_abort_says_whether_it_ended_something(make_engine: EngineFactory) -> None:
    engine = make_engine()
    assert not engine.abort_request("unknown")
    engine.add_request([1, 2], greedy(8), "a")
    engine.step()
    tokens = engine.step()[0].outputs[0].token_ids
    assert engine.abort_request("a")
    assert not engine.abort_request("a")
    assert engine.has_unfinished_requests(), "the final output has not been returned yet"
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request([1], greedy(1), "a")
    (final,) = engine.step()
    assert final.finished and final.outputs[0].finish_reason == "abort"
    assert final.outputs[0].token_ids == tokens, "the tokens before the abort are lost"
    assert_idle(engine)
    engine.add_request([1], greedy(1), "a")  # the id is free again
    drain(engine)


def test_a_finished_request_is_forgotten(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(3), "a")
    engine.step()
    alive = weakref.ref(engine.output_processor.requests["a"])
    drain(engine)
    gc.collect()
    assert alive() is None, "I3: something still holds the request"


def test_what_is_cached_can_be_forgotten(make_engine: EngineFactory) -> None:
    """A reset frees no pages that a request reads, and none that a step in flight uses."""
    engine = make_engine()
    prompt, params = list(range(60)), greedy(6, ignore_eos=True)
    expected = engine.generate(prompt, params)[0].outputs[0].token_ids
    cached = engine.stats().kv_pages_cached
    assert engine.reset_prefix_cache() == cached, "I3: a page that no request uses was not freed"
    stats = engine.stats()
    assert stats.kv_pages_cached == 0 and stats.kv_pages_free == stats.kv_pages_total
    for name in "abc":
        engine.add_request(prompt, params, name)
    answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
        engine.reset_prefix_cache()
        engine.check_invariants()
    assert answers == dict.fromkeys("abc", expected), "I2: a reset of the cache changed an answer"
    assert_idle(engine)
    cached_before = engine.stats().cached_prompt_tokens
    engine.generate(prompt, params)
    assert engine.stats().cached_prompt_tokens == cached_before, "the cache is not empty"


@pytest.mark.parametrize("nth", [1, 2, 3, 7])
def test_a_failed_forward_changes_nothing(
    make_engine: EngineFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nth: int,
) -> None:
    """The error is logged, and the requests go on with the next step as if nothing had failed."""
    engine = make_engine(max_num_seqs=3)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(10), f"{i}")
    fail_forward(monkeypatch, shared_model("tiny-llama"), nth, Broken)
    finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
    (record,) = [r for r in caplog.records if "forward failed" in r.message]
    assert record.exc_info is not None and record.exc_info[0] is Broken
    assert len(finals) == len(PROMPTS)
    for output in finals.values():
        assert_one_answer("tiny-llama", output, 10)
    assert_idle(engine)


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failure_while_waiting_for_tokens(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Errors of the device and Ctrl-C arrive where the host waits. No request may have advanced."""
    rows, calls = SamplerOutput.rows, iter(range(1, 10**6))

    def failing(self: SamplerOutput) -> Any:
        if next(calls) == nth:
            raise KeyboardInterrupt
        return rows(self)

    monkeypatch.setattr(SamplerOutput, "rows", failing)
    engine = make_engine(max_num_seqs=3)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(10), f"{i}")
    finals, failures = {}, 0
    while engine.has_unfinished_requests():
        try:
            finals.update({output.request_id: output for output in engine.step()})
        except KeyboardInterrupt:
            failures += 1
            engine.check_invariants()
    assert failures == 1 and len(finals) == len(PROMPTS)
    for output in finals.values():
        assert_one_answer("tiny-llama", output, 10)


def test_a_failed_generate_leaves_nothing(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add_request([4, 5, 6], greedy(12), "bystander")
    engine.step()
    fail_forward(monkeypatch, shared_model("tiny-llama"), 3, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, greedy(10))
    engine.check_invariants()
    finals = drain(engine)
    assert set(finals) == {"bystander"}
    assert_one_answer("tiny-llama", finals["bystander"][-1], 12)


def test_a_stream_left_early_is_aborted(make_engine: EngineFactory) -> None:
    engine = make_engine()
    stream = engine.stream([1, 2, 3], greedy(40, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(engine)


def test_close_refuses_what_comes(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.add_request([1, 2], SamplingParams())
    engine.close()
    engine.close()
    assert_idle(engine)
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request([1, 2])
