"""m5.6: launch step N+1, then update step N. First with a model of hashes, then a real one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from common import EngineConfig, SamplingParams
from common.engine_core import ForwardError
from common.tracing.forced_retractions import force_retractions
from m5_overlap import engine as engine_module
from m5_overlap.schedule_batch import ScheduleBatch
from m5_overlap.scheduler import Scheduler
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import build_engine
from tests.engine.test_overlap import fuzz
from tests.exercises.by_hand import make_request, scheduled, watch
from tests.helpers.fake_overlap import hash_engine
from tests.helpers.fake_paged import expected_tokens
from tests.helpers.oracle import assert_one_answer, drain, greedy

MOST_STEPS = 1000  # an engine that makes no progress fails here, and does not hang


def scheduler_of(num_pages: int, **config: Any) -> Scheduler:
    settings: dict[str, Any] = {"page_size": 2, "max_num_seqs": 4, **config}
    return Scheduler(EngineConfig(model="none", **settings), num_pages)


def in_flight(scheduler: Scheduler, *prompts: Sequence[int], max_tokens: int = 20) -> ScheduleBatch:
    """Plan a step of these prompts and advance their requests, as `step` does before a launch."""
    for i, prompt in enumerate(prompts):
        scheduler.add_request(make_request(f"{i}", prompt, max_tokens=max_tokens))
    batch = scheduler.schedule()
    scheduler.in_flight.advance(batch)
    return batch


def counted(scheduler: Scheduler) -> dict[str, int]:
    """Return the numbers of steps, and of tokens of prompts, of decodes, and for no request."""
    c = scheduler.counters
    return {
        "steps": c.num_steps, "prefill": c.prefill_tokens, "decode": c.decode_tokens,
        "padding": c.padding_tokens,
    }  # fmt: skip


def engine_of(stream: LateStream, num_pages: int = 64, **config: Any) -> Any:
    """Return an engine without tensors, on a stream that runs as late (or as early) as possible."""
    engine: Any = hash_engine(engine_module, stream, num_pages, **config)
    step, count = engine.step, itertools.count(1)

    def counted() -> Any:
        assert next(count) < MOST_STEPS, (
            f"I5: {MOST_STEPS} steps, and a request has not finished: does each step advance its "
            "batch, complete it, and append its tokens?"
        )
        outputs = step()
        errors = [output.outputs[0].error for output in outputs if output.outputs[0].error]
        assert not errors, f"a request ended with an error: {errors[0]}"
        return outputs

    engine.step = counted
    return engine


def run(engine: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens of each prompt; each ends once, and no output shows a placeholder."""
    names = [engine.add_request(p, greedy(max_tokens, ignore_eos=True)) for p in prompts]
    finals: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id not in finals, "no output may follow the final output"
            tokens = output.outputs[0].token_ids
            assert min(tokens, default=0) >= 0, f"I1: a placeholder in an output: {tokens}"
            if output.finished:
                finals[output.request_id] = tokens
    return [finals[name] for name in names]


def assert_answers(engine: Any, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Require the tokens of the requests alone, and that the engine holds nothing after them."""
    expected = [expected_tokens(prompt, max_tokens) for prompt in prompts]
    assert run(engine, prompts, max_tokens) == expected, "I1, I2"
    assert_idle(engine)


# Why: the pages of the pool, the prompts in step N, their max_tokens, and whether to wait for N.
SHORT: dict[str, tuple[int, list[list[int]], int, bool]] = {
    "both requests have room in their last page": (20, [[1, 2, 3], [4, 5, 6]], 20, False),
    "step N+1 needs a third page, and one is free": (3, [[1, 2], [4]], 20, False),
    "no page is free: a request that ends in N may save a retraction": (2, [[1, 2], [4]], 20, True),
    "both end in step N: step N+1 has no request": (2, [[1, 2], [4, 5]], 1, False),
}


@pytest.mark.parametrize("why", SHORT)
def test_memory_is_short_when_a_page_is_missing(why: str) -> None:
    num_pages, prompts, max_tokens, is_short = SHORT[why]
    scheduler = scheduler_of(num_pages)
    scheduler.admission.new_token_ratio = 0.0  # admit both, whatever they may need later
    in_flight(scheduler, *prompts, max_tokens=max_tokens)
    assert scheduler.needs_result() == is_short, why


def test_pages_that_the_tree_would_give_up_can_be_had() -> None:
    scheduler = scheduler_of(num_pages=3)
    scheduler.admission.new_token_ratio = 0.0
    [cached] = scheduler.kv_cache.allocator.allocate(1)
    scheduler.kv_cache.radix_cache.insert([9, 9], [cached])
    in_flight(scheduler, [1, 2], [4])
    assert not scheduler.needs_result(), "no page is free, but a cached page can be evicted"


@pytest.mark.parametrize("is_disabled", [False, True])
def test_two_prefills_overlap_unless_the_configuration_forbids_it(is_disabled: bool) -> None:
    scheduler = scheduler_of(num_pages=20, disable_consecutive_prefill_overlap=is_disabled)
    in_flight(scheduler, [1, 2, 3])
    assert not scheduler.needs_result(), "no prompt waits: step N+1 is a decode step"
    scheduler.add_request(make_request("next", [7, 8, 9]))
    assert scheduler.needs_result() == is_disabled, "step N computes a prompt, and N+1 the next one"


def test_a_prefix_in_flight_is_worth_waiting_for() -> None:
    scheduler = scheduler_of(num_pages=20)
    in_flight(scheduler, [1, 2, 3, 4, 5])
    assert not scheduler.needs_result()
    scheduler.add_request(make_request("alike", [1, 2, 3, 4, 9]))
    assert scheduler.needs_result(), (
        "step N computes 1 2 3 4, which the waiting request needs: if step N+1 is planned before "
        "N has ended, it cannot admit that request"
    )


def test_the_end_of_a_step_appends_its_tokens() -> None:
    """The placeholder goes, the token comes. A chunk of a prompt gets no token."""
    scheduler = scheduler_of(num_pages=20, max_num_batched_tokens=5)
    batch = in_flight(scheduler, [1, 2, 3], [4, 5, 6])
    ends, chunk = batch.requests
    [output] = scheduler.update_from_output(batch, [(70, None)])
    assert (output.request, output.new_tokens) == (ends, ((70, None),))
    assert ends.token_ids == [1, 2, 3, 70], "I1: token 70 was sampled; it replaces the placeholder"
    assert chunk.token_ids == [4, 5, 6], "I1: a chunk gets no token, and has no placeholder"
    assert (ends.num_computed_tokens, chunk.num_computed_tokens) == (3, 2), (
        "both were advanced when the step was launched: do not advance them again"
    )
    scheduler.check_invariants()


def test_each_token_of_a_step_is_counted_once() -> None:
    scheduler = scheduler_of(num_pages=20, max_num_batched_tokens=4)
    batch = in_flight(scheduler, [1, 2, 3], [4, 5, 6])
    scheduler.update_from_output(batch, [(70, None)])
    batch = in_flight(scheduler)
    scheduler.update_from_output(batch, [(71, None), (72, None)])
    assert counted(scheduler) == {"steps": 2, "prefill": 6, "decode": 1, "padding": 0}, (
        "step 1 computes four tokens of prompts, step 2 the other two and one decode"
    )


def test_output_that_is_computed_again_is_decode() -> None:
    """After a retraction, one chunk has the prompt and the output of a request."""
    scheduler = scheduler_of(num_pages=20)
    scheduler.add_request(make_request("again", [1, 2, 3], output=2))
    batch = in_flight(scheduler)
    scheduler.update_from_output(batch, [(70, None)])
    assert counted(scheduler) == {"steps": 1, "prefill": 3, "decode": 2, "padding": 0}, (
        "of the five tokens, three are of the prompt, and two are output that is computed again"
    )


def test_only_prompts_enter_the_tree_step_by_step() -> None:
    """A decode step inserts nothing: its pages enter the tree when the request ends."""
    scheduler = scheduler_of(num_pages=20)
    inserted: list[str] = []
    watch(scheduler.kv_cache, "insert", lambda request: inserted.append(request.request_id))
    batch = in_flight(scheduler, [1, 2, 3], [4, 5, 6])
    scheduler.update_from_output(batch, [(70, None), (71, None)])
    assert inserted == ["0", "1"], "the step has computed prompt tokens of both requests"
    batch = in_flight(scheduler)
    scheduler.update_from_output(batch, [(72, None), (73, None)])
    assert inserted == ["0", "1"], (
        f"a decode step has no prompt tokens, and insert was called for {inserted[2:]}: the work "
        "of each step would grow with the lengths of all requests"
    )


def test_a_request_that_has_ended_gets_no_token() -> None:
    """One of two requests is aborted while its step is in flight: its token is dropped."""
    scheduler = scheduler_of(num_pages=20)
    batch = in_flight(scheduler, [1, 2, 3], [4, 5])
    gone, stays = batch.requests
    scheduler.finish_request(gone, "abort")
    outputs = scheduler.update_from_output(batch, [(70, None), (71, None)])
    assert [output.request for output in outputs] == [stays], "no output may follow the end"
    assert 70 not in gone.token_ids, "I1: the request had ended: its token 70 is dropped"
    assert stays.token_ids == [4, 5, 71], "I1: the other request gets its token 71"
    assert counted(scheduler) == {"steps": 1, "prefill": 2, "decode": 0, "padding": 3}, (
        "three tokens were computed for no request, and two for the prompt of the other one"
    )
    assert gone.row is None, "I3: no step writes to its pages any more"
    scheduler.check_invariants()


def test_a_prompt_enters_the_tree_before_its_request_ends() -> None:
    """The request ends with its first token. Its pages stay in the tree, and no other memory."""
    scheduler = scheduler_of(num_pages=20)
    batch = in_flight(scheduler, [1, 2, 3, 4, 5], max_tokens=1)
    [output] = scheduler.update_from_output(batch, [(70, None)])
    assert output.finish_reason == batch.requests[0].finish_reason == "length"
    assert not scheduler.running, "a request that ends must leave its queue (`finish_request`)"
    assert scheduler.kv_cache.radix_cache.evictable_size == 2, "its whole pages stay cached"
    scheduler.check_invariants()


def test_an_idle_engine_does_nothing() -> None:
    engine = engine_of(LateStream())
    assert engine.step() == [] and engine.step() == []
    assert engine.core.runner.num_launches == 0 and engine.stats().num_steps == 0


def test_a_step_returns_while_the_next_one_is_in_flight() -> None:
    """The lesson in two counters: one launch ahead, and one wait in each step."""
    stream = LateStream()
    engine = engine_of(stream, max_num_seqs=4)
    for i in range(3):
        engine.add_request([i, 1, 2], greedy(8, ignore_eos=True))
    for step in range(1, 8):
        outputs = engine.step()
        assert len(outputs) == 3, f"step() number {step} returns the outputs of step {step}"
        assert engine.core.runner.num_launches == step + 1, f"step {step + 1} must be in flight"
        assert stream.num_waits == step, "the host must wait once a step"
    engine.step()
    launches, steps = engine.core.runner.num_launches, engine.stats().num_steps
    assert (launches, steps) == (8, 8), "eight tokens of each request: 8 launches, and 8 steps"
    assert_idle(engine)


def test_step_n_plus_1_is_launched_before_step_n_is_waited_for() -> None:
    events: list[str] = []
    stream = LateStream()
    engine = engine_of(stream)
    watch(engine.core.runner, "launch", lambda *_: events.append("launch"))
    watch(stream, "run_until", lambda _: events.append("wait"))
    run(engine, [[1, 2]], 4)
    assert events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"], (
        "first two launches, then in turns a wait for the older step and a launch"
    )


def test_without_overlap_a_step_is_whole() -> None:
    stream = LateStream()
    engine = engine_of(stream, enable_overlap=False)
    engine.add_request([1, 2, 3], greedy(5, ignore_eos=True))
    for step in range(1, 6):
        engine.step()
        assert engine.core.runner.num_launches == step == stream.num_waits, "launch, wait, update"
    assert_idle(engine)


@pytest.mark.parametrize("stream", [LateStream, EarlyStream])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_the_tokens_are_those_of_the_requests_alone(
    stream: type[LateStream], max_tokens: int
) -> None:
    engine = engine_of(stream(), max_num_seqs=3, page_size=2)
    prompts = [[i] * (1 + 2 * i) for i in range(1, 7)]
    assert_answers(engine, prompts, max_tokens)
    stats = engine.stats()
    assert stats.padding_tokens == 0, "all ends were known in advance: no token is dropped"
    assert stats.prefill_tokens + stats.cached_prompt_tokens == sum(map(len, prompts)), (
        "each prompt token is computed once (prefill), or found in the tree"
    )
    assert stats.decode_tokens == len(prompts) * (max_tokens - 1)


def test_overlapping_changes_no_step() -> None:
    """If all ends are known, both loops run the same steps: same requests, same chunks."""

    def steps_of(enable_overlap: bool) -> list[Any]:
        steps: list[Any] = []
        engine = engine_of(
            LateStream(), max_num_seqs=3, max_num_batched_tokens=7, enable_overlap=enable_overlap
        )
        watch(engine.core.runner, "launch", lambda batch, _: steps.append(scheduled(batch)))
        for i in range(7):
            params = greedy(1 + 3 * (i % 3), ignore_eos=True)
            engine.add_request([i + 1] * (1 + 5 * (i % 3)), params, f"{i}")
        drain(engine)
        return steps

    assert steps_of(enable_overlap=True) == steps_of(enable_overlap=False)


@pytest.mark.parametrize("stream", [LateStream, EarlyStream])
def test_a_request_that_ends_unforeseen_leaves_one_step_later(stream: type[LateStream]) -> None:
    """It samples its stop token in N while N+1 is in flight: its token of N+1 is dropped."""
    engine = engine_of(stream(), page_size=1)
    answer = expected_tokens([5, 6], 20)
    length = answer.index(answer[3]) + 1
    stops = greedy(20, stop_token_ids=[answer[3]], ignore_eos=True)
    engine.add_request([5, 6], stops, "stops")
    engine.add_request([8, 9], greedy(20, ignore_eos=True), "goes on")
    outputs: dict[str, Any] = {}
    while not any(output.finished for output in outputs.values()):
        outputs = {output.request_id: output for output in engine.step()}
    final = outputs["stops"].outputs[0]
    assert (final.token_ids, final.finish_reason) == (answer[:length], "stop"), "I1"
    assert [r.request_id for r in engine.core.scheduler.in_flight.finished] == ["stops"], (
        "I3: step N+1 writes to its pages: they must be held until it has ended"
    )
    rest = drain(engine)
    assert "stops" not in rest, "no output may follow the final output"
    assert engine.stats().padding_tokens == 1, "one token was computed and dropped"
    assert rest["goes on"][-1].outputs[0].token_ids == expected_tokens([8, 9], 20), "I2"
    assert_idle(engine)


def test_a_step_without_live_requests_is_dropped() -> None:
    """The only request stops in step N. When its final output is returned, no step is in flight."""
    engine = engine_of(LateStream(), page_size=1)
    answer = expected_tokens([5, 6], 20)
    engine.add_request([5, 6], greedy(20, stop_token_ids=[answer[0]], ignore_eos=True))
    outputs = engine.step()
    assert [output.finished for output in outputs] == [True]
    assert not engine.core.result_queue, "step N+1 has no other request: it must be dropped"
    stats = engine.stats()
    assert (stats.num_steps, stats.padding_tokens) == (1, 0), (
        "step N+1 is undone: the host does not wait for its result, and counts nothing of it"
    )
    assert_idle(engine)


def test_an_abort_of_the_last_request_drops_its_steps() -> None:
    """Of two requests in flight, one is aborted: step N+1 is needed. Then the other is, too."""
    engine = engine_of(LateStream(), page_size=2)
    for name in ("first", "second"):
        engine.add_request([5, 6], greedy(9, ignore_eos=True), name)
    engine.step()
    engine.abort_request("first")
    assert len(engine.core.result_queue) == 1, (
        "the step in flight computes a token of the other request"
    )
    engine.abort_request("second")
    assert not engine.core.result_queue, "I3: no request of the step in flight is left, so drop it"
    assert len(drain(engine)) == 2, "both get their final output"
    assert_idle(engine)


def test_an_abort_between_two_steps() -> None:
    """The token in flight of the aborted request is dropped, and the neighbour's is exact."""
    engine = engine_of(LateStream(), page_size=2)
    for name, prompt in (("goes", [5, 6]), ("stays", [7, 8])):
        engine.add_request(prompt, greedy(9, ignore_eos=True), name)
    engine.step()
    engine.step()
    assert engine.abort_request("goes")
    history = drain(engine)
    [final] = history["goes"]
    assert final.finished and final.outputs[0].finish_reason == "abort"
    assert final.outputs[0].token_ids == expected_tokens([5, 6], 9)[:2], (
        "I1: two steps have ended, so its output has two tokens"
    )
    assert history["stays"][-1].outputs[0].token_ids == expected_tokens([7, 8], 9)
    assert_idle(engine)


def test_a_prompt_is_shared_after_its_forward_and_not_before() -> None:
    """Six prompts share a stem: one computes it, and the others join in the step after."""
    engine = engine_of(LateStream(), page_size=4, max_num_seqs=8)
    stem = [1] * 32
    assert_answers(engine, [[*stem, 40 + i, 3] for i in range(6)], 4)
    assert engine.stats().prefill_tokens == 34 + 5 * 2, (
        "the stem is computed once, and two more tokens of each prompt"
    )


def test_retraction_on_little_memory() -> None:
    engine = engine_of(LateStream(), num_pages=12, page_size=2, max_num_seqs=4)
    assert_answers(engine, [[1, 2], [3, 4], [5, 6]], 16)
    assert engine.stats().num_retractions > 0, "the pool is too small for all three requests"


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_retraction_happens_between_two_steps(every: int) -> None:
    """A test instrument retracts a request in every such step, and makes `needs_result` say so."""
    engine = engine_of(LateStream(), page_size=2, max_num_seqs=4)
    force_retractions(engine.core.scheduler, every)
    assert_answers(engine, [[1, 2], [3, 4, 5], [5, 6]], 9)
    assert engine.stats().num_retractions > 0


def test_a_launch_that_fails_changes_nothing() -> None:
    """I3: the failed launch and the step in flight are both undone, and the requests go on."""
    engine = engine_of(LateStream(), page_size=2)
    engine.add_request([5, 6, 7], greedy(8, ignore_eos=True), "a")
    engine.step()
    with patch.object(engine.core.runner, "launch", side_effect=MemoryError):
        assert engine.step() == [], "I3: the step in flight must be undone too"
    engine.check_invariants()
    final = drain(engine)["a"][-1]
    assert final.outputs[0].token_ids == expected_tokens([5, 6, 7], 8), "I1"
    assert_idle(engine)


def test_a_forward_that_fails_changes_nothing() -> None:
    """I3: the failure appears when the host waits. The step and the one behind it are undone."""
    engine = engine_of(LateStream(), page_size=2)
    engine.add_request([5, 6, 7], greedy(8, ignore_eos=True), "a")
    engine.step()
    _batch, result = engine.core.result_queue[0]
    with patch.object(result, "wait", side_effect=MemoryError):
        try:
            engine.core.step()
        except ForwardError:
            pass
        except MemoryError as error:
            raise AssertionError(
                "I3: the error of the forward leaves `step` as it is, and the steps are still in "
                "flight: `EngineCore.wait` undoes them, and raises a `ForwardError`"
            ) from error
    engine.check_invariants()
    final = drain(engine)["a"][-1]
    assert final.outputs[0].token_ids == expected_tokens([5, 6, 7], 8), "I1: the request goes on"
    assert_idle(engine)


@pytest.mark.parametrize("stream", [LateStream, EarlyStream])
def test_random_schedules(stream: type[LateStream]) -> None:
    """Arrivals, stops, aborts and retractions on a few pages: exact tokens, audited each step."""
    for seed in range(60):
        fuzz(engine_module, seed, stream)


def test_the_answers_are_hugging_faces() -> None:
    """I1 for the whole engine: thread, futures, buffers, padded decodes, the tree, the loop."""
    prompts = [[i + 3] * (1 + 7 * i) for i in range(5)] + [[7] * 20 + [i] for i in range(3)]
    assert run(engine_of(EarlyStream(), max_num_seqs=4), prompts, 9), "first without a model"
    with build_engine("m5_overlap", max_num_seqs=4, page_size=4, enable_overlap=True) as engine:
        params = [greedy(2 + (5 * i) % 9, ignore_eos=True) for i in range(len(prompts))]
        for output, one in zip(engine.generate(prompts, params), params, strict=True):
            assert_one_answer("tiny-llama", output, one.max_tokens)
    assert_idle(engine)


def test_sampling_does_not_notice() -> None:
    """I2: a draw depends only on seed and position, in the overlapped and in the serial loop."""
    prompts = [[1 + i, 2, 3] for i in range(5)]
    assert run(engine_of(EarlyStream(), max_num_seqs=3), prompts, 4), "first without a model"
    texts = []
    for overlap in (False, True):
        with build_engine("m5_overlap", max_num_seqs=3, enable_overlap=overlap) as engine:
            params = SamplingParams(max_tokens=8, temperature=1, seed=11, ignore_eos=True)
            outputs = engine.generate(prompts, params)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]
