"""m2.6: results. `Scheduler.update_from_output`, `EngineCore.step`; then the whole engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common import Request, SamplingParams
from common.engine_core import EngineCoreOutput, ForwardError, SampledToken
from m2_continuous.schedule_batch import ScheduleBatch
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import build_engine
from tests.exercises.by_hand import Broken, break_next_forward, break_next_rows, names
from tests.helpers.oracle import assert_one_answer, drain, greedy

PROMPTS = [[7], list(range(15)), list(range(60, 76)), [5] * 33, [1, 2], list(range(90, 97))]


def make_engine(**config: Any) -> Any:
    """Return an engine on tiny-llama, which is audited after each step."""
    engine: Any = build_engine("m2_continuous", **config)
    assert update(engine, [], [], []) == [], "an empty batch gives no outputs"
    assert engine.stats().num_steps == 0, "an empty batch does not count as a step"
    return engine


def update(
    engine: Any, requests: list[Request], counts: list[int], tokens: list[int]
) -> list[EngineCoreOutput]:
    """Process a step that computed `counts` tokens of the requests, and sampled these tokens."""
    sampled: list[SampledToken] = [(token, None) for token in tokens]
    outputs = engine.core.scheduler.update_from_output(ScheduleBatch(requests, counts), sampled)
    return list(outputs)


def running(engine: Any, lengths: dict[str, int], max_tokens: int = 9) -> list[Request]:
    """Let requests run in rows, by hand, and return them.

    `lengths`: the number of tokens of each; all but the newest are in the cache. Every number in
    row r of the pool is r + position / 100.
    """
    requests: list[Request] = []
    for name, length in lengths.items():
        engine.add_request(list(range(1, length)), greedy(max_tokens, ignore_eos=True), name)
        request = engine.core.scheduler.waiting.pop()
        request.token_ids.append(50)
        request.num_computed_tokens = length - 1
        request.row = len(requests)
        requests.append(request)
    engine.core.scheduler.running[:] = requests
    engine.core.scheduler.kv_cache.rows[:] = requests
    for memory in (*engine.core.runner.kv_pool.keys, *engine.core.runner.kv_pool.values):
        rows, _, tokens, _ = memory.shape
        numbers = torch.arange(rows)[:, None] + torch.arange(tokens) / 100
        memory.copy_(numbers[:, None, :, None].expand_as(memory))
    return requests


def assert_moved(engine: Any, request: Request, origin: int) -> None:
    """Require that a row has the numbers of the row `origin`, in every layer."""
    pool, count = engine.core.runner.kv_pool, request.num_computed_tokens
    expected = torch.tensor([origin + position / 100 for position in range(count)])
    for memory in (*pool.keys, *pool.values):
        got = memory[request.row, 0, :count, 0]
        assert torch.allclose(got, expected), (
            f"I2: the {count} computed tokens of {request.request_id} were {expected} in row "
            f"{origin}; row {request.row} has {got}"
        )


def abort_all(engine: Any) -> None:
    engine.close()
    assert_idle(engine)


def test_each_request_gets_its_token() -> None:
    """The batch is in the order of the rows. After a row has moved, `running` has another one."""
    engine = make_engine()
    a, b, c = requests = running(engine, {"A": 4, "B": 6, "C": 5})
    outputs = update(engine, [a, c, b], [1, 1, 1], [21, 23, 22])
    got = {output.request.request_id: output.request.token_ids[-1] for output in outputs}
    assert got == {"A": 21, "B": 22, "C": 23}, "I2: the batch A C B has sampled tokens 21 23 22"
    assert not any(output.finish_reason for output in outputs), "none has reached its end"
    computed = [request.num_computed_tokens for request in requests]
    assert computed == [4, 6, 5], "each has one more computed token"
    abort_all(engine)


def test_the_counters_tell_prompts_from_decodes_and_padding() -> None:
    """Prompts of 3 and 8 tokens are padded to 8. Then both requests decode."""
    engine = make_engine()
    requests = running(engine, {"A": 4, "B": 9})
    for request in requests:
        request.token_ids.pop()
        request.num_computed_tokens = 0
    update(engine, requests, [3, 8], [21, 22])
    update(engine, requests, [1, 1], [23, 24])
    s = engine.stats()
    counted = (s.num_steps, s.prefill_tokens, s.decode_tokens, s.padding_tokens)
    assert counted == (2, 11, 2, 5), "2 steps; 11 prompt tokens, 2 decode tokens, 5 padding tokens"
    abort_all(engine)


def test_a_prompt_of_one_token_is_prefill() -> None:
    engine = make_engine()
    (request,) = running(engine, {"A": 2})
    request.token_ids.pop()
    request.num_computed_tokens = 0
    update(engine, [request], [1], [21])
    update(engine, [request], [1], [22])
    counted = engine.stats().prefill_tokens, engine.stats().decode_tokens
    assert counted == (1, 1), "A computed its prompt of 1 token, and then 1 token of its output"
    abort_all(engine)


def test_a_move_is_made_once() -> None:
    """The runner removes a move from the list when it has made it."""
    engine = make_engine()
    for name, max_tokens in (("A", 2), ("B", 6), ("C", 6)):
        engine.add_request([1, 2, 3], greedy(max_tokens, ignore_eos=True), name)
    for _ in range(3):  # A ends in the second step, and the third one begins with the move of C
        engine.core.step()
    assert engine.core.scheduler.kv_cache.moves == [], (
        "I2: C has moved into A's row. A move that stays in the list is made again in each step"
    )
    engine.close()


def test_a_moved_row_brings_the_token_of_this_step_along() -> None:
    """A ends in the step that stores C's fifth token: C moves with five tokens, not with four."""
    engine = make_engine()
    a, b, c = requests = running(engine, {"A": 4, "B": 6, "C": 5})
    a.max_num_tokens = 5
    outputs = update(engine, requests, [1, 1, 1], [21, 22, 23])
    finals = [output.request.request_id for output in outputs if output.finish_reason]
    assert finals == ["A"], "A has reached its limit of 5 tokens"
    scheduler = engine.core.scheduler
    assert scheduler.kv_cache.rows == [c, b], "I3: A left row 0, and C must have moved there"
    assert scheduler.running == [b, c], "I3: A has ended"
    scheduler.check_invariants()
    engine.core.runner.run(ScheduleBatch([], []), scheduler.kv_cache.moves)
    assert_moved(engine, c, origin=2)
    abort_all(engine)


def test_several_may_end_in_one_step() -> None:
    engine = make_engine()
    a, b, c, d = requests = running(engine, {"A": 4, "B": 6, "C": 5, "D": 7})
    a.max_num_tokens, d.max_num_tokens = 5, 8
    update(engine, requests, [1] * 4, [21, 22, 23, 24])
    kv_cache = engine.core.scheduler.kv_cache
    assert set(kv_cache.rows) == {b, c}, "I3: A and D have ended, and only B and C own rows"
    engine.core.runner.run(ScheduleBatch([], []), kv_cache.moves)
    for request, origin in ((b, 1), (c, 2)):
        assert_moved(engine, request, origin)
    abort_all(engine)


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_failed_step_is_undone(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """KeyboardInterrupt is no `Exception`, and it can come in the middle of a forward too."""
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(6), "A")
    engine.core.step()
    for name in "XY":
        engine.add_request([4, 5, 6], greedy(6), name)
    break_next_forward(engine, monkeypatch, error)
    with pytest.raises((ForwardError, error)) as caught:
        engine.core.step()
    scheduler = engine.core.scheduler
    got = names(scheduler.running), names(scheduler.waiting), names(scheduler.kv_cache.rows)
    assert got == ("A", "X Y", "A"), "I3: the prefill failed: X and Y wait again, without rows"
    assert isinstance(caught.value, ForwardError), (
        f"the shell must get a ForwardError with the requests, not {caught.value!r}"
    )
    assert names(caught.value.requests) == "X Y", "the error names the requests of the step"
    engine.close()


def test_reading_the_tokens_is_part_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, `run` returns before the forward has ended: its error comes with the tokens."""
    engine = make_engine()
    engine.add_request([1, 2, 3], greedy(6), "A")
    break_next_rows(engine, monkeypatch)
    with pytest.raises((ForwardError, Broken)) as caught:
        engine.core.step()
    assert isinstance(caught.value, ForwardError), (
        "I3: `rows()` failed, and the shell must get a ForwardError; A still "
        + ("has a row" if engine.core.scheduler.running else "waits")
    )
    engine.close()


def test_after_a_failed_forward_all_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, greedy(6))
    engine.step()
    break_next_forward(engine, monkeypatch)
    assert engine.step() == [], "the forward failed: no request got a token"
    for outputs in drain(engine).values():
        assert_one_answer("tiny-llama", outputs[-1], 6)
    assert_idle(engine)


@pytest.mark.parametrize(
    "config", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 40}], ids=str
)
def test_one_answer_in_any_company(config: dict[str, int]) -> None:
    """Rows are freed in the middle and prompts differ in length: the tokens are Hugging Face's."""
    engine = make_engine(**config)
    params = [greedy(3 + 2 * i) for i in range(len(PROMPTS))]
    for output, one in zip(engine.generate(PROMPTS, params), params, strict=True):
        assert_one_answer("tiny-llama", output, one.max_tokens)
    assert_idle(engine)


def test_a_sampled_answer_does_not_depend_on_its_neighbours() -> None:
    params = [SamplingParams(max_tokens=6, temperature=0.9, seed=i) for i in range(4)]
    together = make_engine().generate(PROMPTS[:4], params)
    for prompt, one, output in zip(PROMPTS, params, together, strict=False):
        (alone,) = make_engine().generate(prompt, one)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids, "I2: batched, and alone"


def test_sixteen_requests_take_the_steps_of_one() -> None:
    """The lesson, counted: 16 answers of 8 tokens take 8 forwards. One by one they take 128."""
    engine = make_engine(max_num_seqs=16)
    engine.generate([[i + 1, 2, 3] for i in range(16)], greedy(8, ignore_eos=True))
    assert engine.stats().num_steps == 8, "one prefill and seven decodes for all requests"


def test_a_request_joins_while_others_run() -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(6, ignore_eos=True), "first")
    engine.step()
    engine.add_request([3, 4, 5], greedy(2, ignore_eos=True), "second")
    ends = []
    while engine.has_unfinished_requests():
        ends += [output.request_id for output in engine.step() if output.finished]
    assert ends == ["second", "first"], "the second request is shorter and must end first"
