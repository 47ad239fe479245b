"""multi_step: plans of several steps, their ends, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import EngineFactory, build_engine
from tests.exercises.by_hand import watch
from tests.helpers.oracle import assert_one_answer, drain, greedy

pytestmark = [pytest.mark.since("multi_step"), pytest.mark.streams]

NUM_STEPS = 8
PROMPT = [5, 6]


def tokens_of(count: int) -> list[int]:
    """Return the first tokens that m4 generates for the prompt."""
    with build_engine("m4_radix") as engine:
        output = engine.generate([PROMPT], greedy(count, ignore_eos=True), progress=False)[0]
    return output.outputs[0].token_ids


def stop_at(number: int) -> tuple[int, int]:
    """Return a token to stop at, the `number`-th or a later one, and how many tokens that gives."""
    tokens = tokens_of(40)
    for count in range(number, 41):
        if tokens.index(tokens[count - 1]) == count - 1:
            return tokens[count - 1], count
    raise AssertionError("the model repeats itself")


def launches_of(engine: Any) -> list[int]:
    """Return a list to which each launch of the engine appends its number of requests."""
    sizes: list[int] = []
    watch(engine.core.runner, "launch", lambda batch, _: sizes.append(len(batch.requests)))
    return sizes


def test_a_plan_is_launched_at_once_and_gives_a_token_per_step(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(enable_overlap=True)
    launched = launches_of(engine)
    name = engine.add_request(PROMPT, greedy(20, ignore_eos=True))
    for step in range(1, 21):
        [output] = engine.step()
        assert output.request_id == name and len(output.outputs[0].token_ids) == step
        assert len(launched) == min(20, -(-step // NUM_STEPS) * NUM_STEPS)
    assert engine.stats().num_steps == 20 and engine.stats().padding_tokens == 0
    assert_one_answer("tiny-llama", output, 20)


def test_without_overlap_a_plan_has_one_step(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(enable_overlap=False)
    launched = launches_of(engine)
    engine.add_request(PROMPT, greedy(20, ignore_eos=True))
    for step in range(1, 21):
        engine.step()
        assert len(launched) == step and not engine.core.result_queue


@pytest.mark.parametrize("max_tokens", [1, 4, 8, 9])
def test_no_step_is_planned_after_a_known_end(make_engine: EngineFactory, max_tokens: int) -> None:
    engine: Any = make_engine(enable_overlap=True)
    launched = launches_of(engine)
    output = engine.generate([PROMPT], greedy(max_tokens, ignore_eos=True), progress=False)[0]
    assert len(output.outputs[0].token_ids) == len(launched) == max_tokens
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("number", [1, 2, 7, 8, 9])
def test_a_stop_wastes_the_rest_of_its_plan(make_engine: EngineFactory, number: int) -> None:
    """The tokens after the stop are computed and dropped, and the next request does not wait."""
    stop, count = stop_at(number)
    engine: Any = make_engine(enable_overlap=True)
    params = greedy(40, stop_token_ids=[stop], ignore_eos=True)
    output = engine.generate([PROMPT], params, progress=False)[0]
    assert output.outputs[0].token_ids == tokens_of(count)
    assert output.outputs[0].finish_reason == "stop"
    assert engine.stats().padding_tokens == -count % NUM_STEPS
    assert not engine.core.result_queue, "I5: a useless step must not delay the next request"
    name = engine.add_request(PROMPT, greedy(3, ignore_eos=True))
    assert [o.request_id for o in engine.step()] == [name]


def test_a_request_that_stops_keeps_its_pages_until_the_plan_ends(
    make_engine: EngineFactory,
) -> None:
    """I3: the other steps of its plan still write to them."""
    stop, count = stop_at(2)
    engine: Any = make_engine(page_size=1, num_pages=128, enable_overlap=True)
    engine.add_request(PROMPT, greedy(40, stop_token_ids=[stop], ignore_eos=True), "stops")
    engine.add_request([8, 9], greedy(22, ignore_eos=True), "goes on")
    for step in range(1, 2 * NUM_STEPS + 1):
        engine.step()
        writes = count <= step < -(-count // NUM_STEPS) * NUM_STEPS
        held = [request.request_id for request in engine.core.scheduler.in_flight.finished]
        assert held == (["stops"] if writes else []), f"after step {step}"
    assert engine.stats().padding_tokens == -count % NUM_STEPS
    assert_one_answer("tiny-llama", drain(engine)["goes on"][-1], 22)


def test_a_new_prompt_waits_for_the_end_of_the_plan_and_no_longer(
    make_engine: EngineFactory,
) -> None:
    for before in range(1, NUM_STEPS + 1):
        engine: Any = make_engine(max_num_seqs=2, enable_overlap=True)
        engine.add_request(PROMPT, greedy(60, ignore_eos=True), "long")
        for _ in range(before):
            engine.step()
        engine.add_request([3, 4], greedy(3, ignore_eos=True), "late")
        waited = 1
        while "late" not in [output.request_id for output in engine.step()]:
            waited += 1
        assert waited == NUM_STEPS - before + 1, f"it came after step {before} of a plan"
        drain(engine)


def test_an_abort_within_a_plan(make_engine: EngineFactory) -> None:
    """The client gets the end with the next step; the pages come back when the plan ends."""
    for before in range(1, NUM_STEPS):
        engine: Any = make_engine(page_size=1, num_pages=64, enable_overlap=True)
        engine.add_request(PROMPT, greedy(40, ignore_eos=True), "aborted")
        engine.add_request([8, 9], greedy(20, ignore_eos=True), "goes on")
        for _ in range(before):
            engine.step()
        assert engine.abort_request("aborted") and not engine.abort_request("aborted")
        outputs = {output.request_id: output for output in engine.step()}
        assert outputs["aborted"].finished
        assert outputs["aborted"].outputs[0].token_ids == tokens_of(before)
        finals = drain(engine)
        assert "aborted" not in finals, "an aborted request has one final output"
        assert_one_answer("tiny-llama", finals["goes on"][-1], 20)
