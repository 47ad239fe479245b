"""I5: every admitted request finishes, in first-come, first-served order."""

from __future__ import annotations

import pytest

from tests.conftest import EngineFactory
from tests.helpers.oracle import assert_one_answer, drain, greedy

pytestmark = pytest.mark.streams


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("budget", [40, 64, 2048])
def test_a_long_queue_is_served(make_engine: EngineFactory, rows: int, budget: int) -> None:
    engine = make_engine(max_num_seqs=rows, max_num_batched_tokens=budget)
    prompts = [[i + 1] * (1 + 13 * i % 40) for i in range(20)]
    outputs = engine.generate(prompts, [greedy(1 + i % 7) for i in range(20)])
    for i, output in enumerate(outputs):
        assert output.prompt_token_ids == prompts[i], "outputs are not in prompt order"
        assert_one_answer("tiny-llama", output, 1 + i % 7)


def test_every_step_makes_progress(make_engine: EngineFactory) -> None:
    """A step without outputs, while requests wait or run, would be the start of a deadlock."""
    engine = make_engine(max_num_seqs=2)
    for i in range(7):
        engine.add_request([i, 2, 3], greedy(5))
    while engine.has_unfinished_requests():
        before = engine.stats()
        assert engine.step(), "I5: a step moved no request"
        after = engine.stats()
        assert after.num_steps == before.num_steps + 1


def test_first_come_first_served(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=2)
    ids = [engine.add_request([i + 1] * (20 - 3 * i), greedy(6, ignore_eos=True)) for i in range(6)]
    first_seen: list[str] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id not in first_seen:
                first_seen.append(output.request_id)
    assert first_seen == ids


def test_idle_steps_do_nothing(make_engine: EngineFactory) -> None:
    engine = make_engine()
    assert engine.step() == []
    assert engine.stats().num_steps == 0
    engine.generate([1, 2], greedy(2))
    steps = engine.stats().num_steps
    assert engine.step() == [] and engine.stats().num_steps == steps


@pytest.mark.since("m2_continuous")
@pytest.mark.before("multi_step")
def test_requests_join_between_two_tokens(make_engine: EngineFactory) -> None:
    """The second request gets its first token long before the first request ends."""
    engine = make_engine(max_num_seqs=2)
    engine.add_request([1, 2], greedy(30, ignore_eos=True), "long")
    for _ in range(5):
        engine.step()
    engine.add_request([3, 4], greedy(3, ignore_eos=True), "late")
    outputs = {o.request_id: o for o in engine.step()}
    outputs.update({o.request_id: o for o in engine.step()})
    assert len(outputs["late"].outputs[0].token_ids) >= 1
    assert not outputs.get("long", outputs["late"]).finished
    late = drain(engine)
    assert late["late"][-1].finished and late["long"][-1].finished


@pytest.mark.since("m2_continuous")
@pytest.mark.before("multi_step")
def test_the_batch_stays_full_while_requests_wait(make_engine: EngineFactory) -> None:
    """No request waits for the longest one of a batch: the next step fills a free row."""
    engine = make_engine(max_num_seqs=4)
    for i in range(16):
        engine.add_request([i + 1, 2], greedy(2 + 5 * (i % 4), ignore_eos=True))
    while engine.stats().num_waiting:
        engine.step()
        stats = engine.stats()
        if stats.num_waiting:
            engine.step()  # this step replaces the requests that ended in the one before
            assert engine.stats().num_running >= 3 or not engine.stats().num_waiting
    drain(engine)
