"""m1.3: tokens become outputs. `update_after_step`, `LLMEngine.process`, `ModelRunner.free`."""

from __future__ import annotations

from typing import Any

from common import EngineConfig, Request
from m1_single import LLMEngine
from m1_single.schedule_batch import ScheduleBatch
from tests.conftest import shared_model
from tests.exercises.by_hand import names
from tests.helpers.oracle import greedy

CACHE: Any = object()  # stands for keys and values


def make_engine(use_cache: bool = True) -> LLMEngine:
    loaded = shared_model("tiny-llama")
    return LLMEngine(EngineConfig(model=loaded.name, device="cpu"), loaded, use_cache=use_cache)


def run(engine: LLMEngine, name: str, prompt: int, max_tokens: int = 9, **params: Any) -> Request:
    """Let a request run that has computed nothing yet, by hand, and return it."""
    engine.add_request(list(range(1, prompt + 1)), greedy(max_tokens, **params), name)
    request = engine.core.scheduler.waiting.pop()
    engine.core.scheduler.running.append(request)
    engine.core.runner.past_key_values[request] = CACHE
    return request


def process(engine: LLMEngine, request: Request, count: int, token: int) -> Any:
    """Process a step that computed `count` tokens and sampled `token`; return its only output."""
    (output,) = engine.process(ScheduleBatch([request], [count]), [(token, None)])
    return output


def counters(engine: LLMEngine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.num_steps, stats.prefill_tokens, stats.decode_tokens


def test_a_request_gets_its_token() -> None:
    engine = make_engine()
    request = run(engine, "A", 3)
    output = process(engine, request, 3, 97)
    assert output.outputs[0].token_ids == [97], (
        f"the output must be [97], not {output.outputs[0].token_ids}"
    )
    assert request.token_ids == [1, 2, 3, 97], (
        f"97 must be appended for the next step: {request.token_ids}"
    )
    assert not output.finished, "A has 1 of 9 output tokens and must not be finished"


def test_what_was_computed_is_in_the_cache() -> None:
    engine = make_engine()
    request = run(engine, "A", 3)
    process(engine, request, 3, 97)
    assert request.num_computed_tokens == 3, (
        f"I1: 3 tokens were computed, and the sampled one was not: {request.num_computed_tokens}"
    )
    process(engine, request, 1, 98)
    assert request.num_computed_tokens == 4, f"I1: 3 + 1, not {request.num_computed_tokens}"


def test_without_the_cache_nothing_counts_as_computed() -> None:
    engine = make_engine(use_cache=False)
    request = run(engine, "A", 3)
    process(engine, request, 3, 97)
    assert request.num_computed_tokens == 0, (
        f"no KV was kept, so the next step begins at 0, not at {request.num_computed_tokens}"
    )


def test_counters_tell_prompt_from_output() -> None:
    engine = make_engine()
    request = run(engine, "A", 3)
    for count, token, expected in ((3, 97, (1, 3, 0)), (1, 98, (2, 3, 1)), (1, 99, (3, 3, 2))):
        process(engine, request, count, token)
        assert counters(engine) == expected, (
            f"(steps, prompt tokens, output tokens fed) is {expected}, not {counters(engine)}"
        )


def test_counters_show_what_recomputing_costs() -> None:
    """Without the cache a step computes the prompt again and all output so far."""
    engine = make_engine(use_cache=False)
    request = run(engine, "A", 3)
    for count in (3, 4, 5):
        process(engine, request, count, 97)
    assert counters(engine) == (3, 9, 3), (
        f"three steps, 3 times 3 prompt tokens, 0 + 1 + 2 output tokens; not {counters(engine)}"
    )


def test_an_empty_step_counts_for_nothing() -> None:
    engine = make_engine()
    outputs = engine.process(ScheduleBatch([], []), [])
    assert (outputs, counters(engine)) == ([], (0, 0, 0)), f"{outputs}, {counters(engine)}"


def test_a_request_that_ends_by_length_keeps_its_last_token() -> None:
    engine = make_engine()
    request = run(engine, "A", 3, max_tokens=2)
    process(engine, request, 3, 97)
    output = process(engine, request, 1, 98)
    got = output.finished, output.outputs[0].finish_reason, output.outputs[0].token_ids
    assert got == (True, "length", [97, 98]), (
        f"max_tokens=2: A ends by length with both tokens, not {got}"
    )


def test_one_token_needs_one_step() -> None:
    engine = make_engine()
    output = process(engine, run(engine, "A", 3, max_tokens=1), 3, 97)
    assert output.finished, "max_tokens=1: the token of the prefill is the whole answer"


def test_a_request_that_has_ended_holds_nothing() -> None:
    engine = make_engine()
    a = run(engine, "A", 3, max_tokens=1)
    engine.add_request([5, 6], greedy(4), "B")
    process(engine, a, 3, 97)
    assert (names(engine.core.scheduler.running), names(engine.core.scheduler.waiting)) == (
        "none",
        "B",
    ), (
        f"I3: A has ended and B waits; running {names(engine.core.scheduler.running)}, waiting "
        f"{names(engine.core.scheduler.waiting)}"
    )
    assert not engine.core.runner.past_key_values, "I3: A's keys and values are still held"
    engine.check_invariants()


def test_an_end_of_sequence_token_ends_a_request() -> None:
    engine = make_engine()
    eos = next(iter(engine.loaded.eos_token_ids))
    output = process(engine, run(engine, "A", 3), 3, eos)
    got = output.finished, output.outputs[0].finish_reason
    assert got == (True, "stop") and not engine.core.scheduler.running, (
        f"I3: A sampled an end-of-sequence token and must end: {got}"
    )


def test_only_the_given_requests_lose_their_memory() -> None:
    """A request that is aborted while it waits has no keys and values. The others keep theirs."""
    engine = make_engine()
    a = run(engine, "A", 3)
    a.num_computed_tokens = 3
    engine.add_request([5, 6], greedy(4), "B")
    engine.core.runner.free([engine.core.scheduler.waiting[0]])
    assert (list(engine.core.runner.past_key_values), a.num_computed_tokens) == ([a], 3), (
        f"I1: A's keys and values are still needed, and its 3 tokens are computed: {a}"
    )


def test_a_request_without_its_keys_begins_anew() -> None:
    engine = make_engine()
    request = run(engine, "A", 3)
    request.num_computed_tokens = 3
    engine.core.runner.free([request])
    assert request not in engine.core.runner.past_key_values and request.num_computed_tokens == 0, (
        f"I1: A has no keys and values, so none of its tokens counts as computed: {request}"
    )
    engine.core.runner.free([request])  # a request without keys and values, too
