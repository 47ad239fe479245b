"""m3.5: pages before chunks. `ScheduleBatch.add`, `Scheduler.schedule` and its helpers.

First the scheduler on a memory of hashes, then the engine against Hugging Face.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from m3_paged import scheduler as scheduler_module
from m3_paged.add_req_result import AddReqResult
from m3_paged.admission import RATIO_DECAY
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import build_engine
from tests.exercises.by_hand import names, scheduled, watch
from tests.exercises.paged_states import PAGE_SIZE, make_scheduler, run, show, wait
from tests.helpers.fake_paged import FakePagedEngine, expected_tokens
from tests.helpers.oracle import assert_one_answer, greedy

PROMPTS = [[7], list(range(15)), list(range(60, 76)), list(range(100, 117)), [5] * 33, [1, 2]]


def make_fake(num_pages: int = 100, **config: Any) -> FakePagedEngine:
    """Return the scheduler on a memory of hashes: reading a wrong slot changes the tokens."""
    return FakePagedEngine(scheduler_module, num_pages, **config)


def make_engine(**config: Any) -> Any:
    """Return an engine on tiny-llama, audited after each step, with NaN in all free pages."""
    assert scheduled(make_scheduler(4).schedule()) == [], "without requests nothing is scheduled"
    return build_engine("m3_paged", **config)


def serve(engine: FakePagedEngine, prompts: dict[str, list[int]], max_tokens: int) -> None:
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens)
    finish(engine, {name: expected_tokens(prompt, max_tokens) for name, prompt in prompts.items()})


def finish(engine: FakePagedEngine, expected: dict[str, list[int]]) -> None:
    steps = 0
    while engine.live:
        steps += 1
        assert steps < 5000, f"I5: the requests do not end; {show(engine.scheduler)}"
        engine.step()
    assert engine.finished == expected, "I1, I2: the tokens of each request"


# Why: the pages of the pool, the tokens of a step, the requests that run, and what is scheduled.
CASES: dict[str, tuple[int, int, dict[str, dict[str, int]], list[tuple[str, int]]]] = {
    "A and B get 1 of 8 tokens each, and X a first chunk of 6": (
        100, 8, {"A": {"prompt": 5}, "B": {"prompt": 9}}, [("A", 1), ("B", 1), ("X", 6)],
    ),
    "B has 2 slots in its third page, and 2 pages of 4 are free: a chunk of 10": (
        5, 100, {"B": {"prompt": 40, "output": 0, "computed": 10}}, [("B", 10)],
    ),
    "I5: two half-computed prompts hold all pages: B, the newest, is retracted for A": (
        8, 100, {name: {"prompt": 30, "output": 0, "computed": 16} for name in "AB"}, [("A", 14)],
    ),
    "A takes a page of B, which is retracted, and there is no memory for B in this step": (
        4, 100, {"A": {"prompt": 8}, "B": {"prompt": 8}}, [("A", 1)],
    ),
    "A has a slot left, and B, the newest, has none and is retracted: it is not scheduled": (
        4, 100, {"A": {"prompt": 7}, "B": {"prompt": 8}}, [("A", 1)],
    ),
    "B computes its 10 tokens again, after a retraction: a chunk, although it has output": (
        100, 100, {"B": {"prompt": 8, "output": 6, "computed": 4}}, [("B", 10), ("X", 16)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", CASES)
def test_what_a_step_computes(why: str) -> None:
    """A prompt X of 16 tokens waits. The requests that are not scheduled wait too."""
    pages, budget, running, expected = CASES[why]
    scheduler = make_scheduler(pages, max_num_batched_tokens=budget)
    scheduler.admission.new_token_ratio = 1.0
    for name, state in running.items():
        run(scheduler, name, **state)
    wait(scheduler, "X", 16)

    def note(_batch: Any, request: Any, num_tokens: int) -> None:
        assert request.row is not None, (
            f"I3: {request.request_id} was retracted in this step, has no row any more, and is "
            f"scheduled with {num_tokens} tokens all the same: {why}; {show(scheduler)}"
        )

    watch(scheduler, "_add", note)
    batch = scheduler.schedule()
    assert scheduled(batch) == expected, f"{why}; {show(scheduler)}"
    left = " ".join({*running, "X"} - {name for name, _ in expected}) or "none"
    assert sorted(names(scheduler.waiting)) == sorted(left), "I3: a live request waits or runs"
    for request, count in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
        needed = -(-(request.num_computed_tokens + count) // PAGE_SIZE)
        assert len(scheduler.kv_cache.pages_of(request)) == needed, "I3: the pages of its tokens"


def test_a_chunk_that_runs_goes_before_a_prompt_that_waits() -> None:
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    run(scheduler, "B", 20, output=0, computed=8)
    run(scheduler, "A", 5)
    wait(scheduler, "X", 20)
    assert scheduled(scheduler.schedule()) == [("A", 1), ("B", 12), ("X", 3)], (
        "I5: first decodes (A), then running chunks (B, 12 left), then X, which waits"
    )


def test_no_request_overtakes_another() -> None:
    """BIG does not fit beside A. If small joined, and others like it, BIG would wait for ever."""
    scheduler = make_scheduler(10)
    scheduler.admission.new_token_ratio = 1.0
    run(scheduler, "A", 8)
    wait(scheduler, "BIG", 20)
    wait(scheduler, "small", 4, max_tokens=2)
    batch = scheduler.schedule()
    assert scheduled(batch) == [("A", 1)], (
        f"I5: BIG came before small and has no memory yet: it must not be overtaken; "
        f"{show(scheduler)}"
    )
    assert batch.add_result is AddReqResult.NO_MEMORY, "`add_result` says why BIG does not join"


def test_only_requests_that_reach_their_end_are_sampled() -> None:
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    run(scheduler, "A", 5)
    run(scheduler, "B", 20, output=0, computed=8)
    wait(scheduler, "X", 20)
    batch = scheduler.schedule()
    assert names(batch.requests[i] for i in batch.sampled_indices) == "A B", (
        "I1: A decodes, B reaches the end of its prompt, and X computes only 3 of 20 tokens"
    )


def test_the_page_of_a_decode_comes_before_a_chunk() -> None:
    """One page is free. If B's chunk took it, A would have to be retracted or to wait."""
    scheduler = make_scheduler(4)
    run(scheduler, "B", 20, output=0, computed=8)
    run(scheduler, "A", 4)
    assert scheduled(scheduler.schedule()) == [("A", 1)], "I5: A decodes, and B has no room"
    assert scheduler.counters.num_retractions == 0, "I5: A gets the free page"


def test_the_ratio_decays_while_all_goes_well() -> None:
    scheduler = make_scheduler(100)
    run(scheduler, "A", 5)
    before = scheduler.admission.new_token_ratio
    scheduler.schedule()
    after = scheduler.admission.new_token_ratio
    assert after == pytest.approx(before - RATIO_DECAY), "a step without retraction lowers it"


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 12, 13])
def test_any_chunk_size_gives_the_same_answer(chunk: int) -> None:
    """Pages of 4 tokens; chunks of 1 token, around a page, and around the prompt of 13."""
    prompts = {"a": [9, 8, 7], "b": list(range(13)), "c": [4] * 8}
    serve(make_fake(page_size=4, max_num_batched_tokens=chunk), prompts, 6)


@pytest.mark.parametrize("index", range(9))
def test_a_retraction_at_any_token_changes_no_answer(index: int) -> None:
    """B is retracted when it has `index` output tokens, and computes them again."""
    engine = make_fake(page_size=2)
    engine.add("A", [1, 2, 3], 12)
    engine.add("B", [4, 5], 9)
    engine.step()
    b = engine.live["B"]
    while b.num_output_tokens < index:
        engine.step()
    if b.row is not None:
        engine.scheduler.retract(b)
    finish(engine, {"A": expected_tokens([1, 2, 3], 12), "B": expected_tokens([4, 5], 9)})


def test_a_long_prompt_does_not_stop_the_others() -> None:
    engine = make_fake(page_size=4, max_num_batched_tokens=16)
    for name in "abc":
        engine.add(name, [1, 2, 3], 30)
    engine.step()
    engine.add("long", [5] * 120, 2)
    while "long" in engine.live:
        decoding = {name for name in "abc" if name in engine.live}
        got = {request.request_id for request in engine.step().requests}
        assert decoding <= got, f"I5: {decoding} decode in each step beside the chunks"


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    """With little memory and any page and chunk size, each request ends with its own tokens."""
    chance = random.Random(seed)
    page_size, longest = chance.choice([1, 2, 3, 4, 16]), chance.choice([6, 20])
    engine = make_fake(
        -(-(longest + 12) // page_size) + chance.choice([0, 1, 5]), page_size=page_size,
        max_num_seqs=chance.randint(1, 6), max_num_batched_tokens=chance.choice([1, 3, 5, 16, 64]),
    )  # fmt: skip
    prompts = {
        f"{i}": [chance.randrange(50) for _ in range(chance.randint(1, longest))]
        for i in range(chance.randint(1, 7))
    }
    serve(engine, prompts, 12)


@pytest.mark.parametrize(
    "config",
    [{}, {"page_size": 4, "max_num_batched_tokens": 8}, {"page_size": 2, "num_pages": 24}],
    ids=["all at once", "chunks", "little memory"],
)
def test_one_answer(config: dict[str, int]) -> None:
    """The whole engine on tiny-llama gives the tokens of Hugging Face."""
    engine = make_engine(**config)
    for output in engine.generate(PROMPTS, greedy(8)):
        assert_one_answer("tiny-llama", output, 8)
    assert_idle(engine)
    assert engine.stats().padding_tokens == 0, "a flat batch has no padding"
    if "num_pages" in config:
        assert engine.stats().num_retractions > 0, "in 48 slots, at least one retraction is needed"


def test_pages_hold_what_rows_could_not() -> None:
    """The lesson, counted: 16 requests run at once in the memory of 4 rows of 64 tokens."""
    engine = make_engine(max_model_len=64, page_size=4, num_pages=64, max_num_seqs=16)
    for i in range(16):
        engine.add_request([i + 1, 2, 3, 4, 5], greedy(8, ignore_eos=True))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.stats().num_running)
    assert most == 16, "each request needs 12 of 256 slots: all 16 run at once"
