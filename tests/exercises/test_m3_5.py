"""m3.5: pages before chunks. `ScheduleBatch.add`, `Scheduler.schedule` and its helpers.

First the scheduler on a memory of hashes, then the engine against Hugging Face.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from m3_paged import scheduler as scheduler_module
from m3_paged.admission import RATIO_DECAY
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import build_engine
from tests.exercises.by_hand import names, scheduled
from tests.exercises.paged_states import make_scheduler, run, show, wait
from tests.helpers.fake_paged import FakePagedEngine, expected_tokens
from tests.helpers.oracle import assert_one_answer, drain, greedy

PROMPTS = [[7], list(range(15)), list(range(60, 76)), list(range(100, 117)), [5] * 33, [1, 2]]


def make_fake(num_pages: int = 100, **config: Any) -> FakePagedEngine:
    """Return the scheduler on a memory of hashes: reading a wrong slot changes the tokens."""
    return FakePagedEngine(scheduler_module, num_pages, **config)


def make_engine(**config: Any) -> Any:
    """Return an engine on tiny-llama, audited after each step, with NaN in all free pages."""
    idle = scheduled(make_scheduler(4).schedule())
    assert idle == [], f"without requests nothing is scheduled, not {idle}"
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
    assert engine.finished == expected, f"I1, I2: got {engine.finished}, expected {expected}"


def test_decodes_and_chunks_share_a_step() -> None:
    scheduler = make_scheduler(100, max_num_batched_tokens=8)
    run(scheduler, "A", 5)
    run(scheduler, "B", 9)
    wait(scheduler, "X", 20)
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1), ("B", 1), ("X", 6)], (
        f"A and B get 1 of the 8 tokens each, X gets a first chunk of 6; scheduled {got}"
    )


def test_a_chunk_that_runs_goes_before_a_prompt_that_waits() -> None:
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    run(scheduler, "B", 20, output=0, computed=8)
    run(scheduler, "A", 5)
    wait(scheduler, "X", 20)
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1), ("B", 12), ("X", 3)], (
        f"I5: first decodes (A), then running chunks (B, 12 left), then X, which waits; got {got}"
    )


def test_only_requests_that_reach_their_end_are_sampled() -> None:
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    run(scheduler, "A", 5)
    run(scheduler, "B", 20, output=0, computed=8)
    wait(scheduler, "X", 20)
    batch = scheduler.schedule()
    got = names(batch.requests[i] for i in batch.sampled_indices)
    assert got == "A B", (
        f"I1: {scheduled(batch)}: A decodes, B reaches the end of its prompt, X computes 3 of 20 "
        f"tokens: A and B are sampled, not {got}"
    )


def test_a_scheduled_request_holds_the_pages_for_its_tokens() -> None:
    scheduler = make_scheduler(100, max_num_batched_tokens=16)
    a = run(scheduler, "A", 4)
    x = wait(scheduler, "X", 20)
    scheduler.schedule()
    got = len(scheduler.kv_cache.pages_of(a)), len(scheduler.kv_cache.pages_of(x))
    assert got == (2, 4), (
        f"I3: A's 5 tokens need 2 pages, X's first 15 tokens need 4: they hold {got}"
    )


def test_the_page_of_a_decode_comes_before_a_chunk() -> None:
    """One page is free. If B's chunk took it, A would have to be retracted or to wait."""
    scheduler = make_scheduler(4)
    run(scheduler, "B", 20, output=0, computed=8)
    run(scheduler, "A", 4)
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1)] and scheduler.counters.num_retractions == 0, (
        f"I5: A decodes and gets the free page; B's next chunk has no room. Scheduled {got}, "
        f"{scheduler.counters.num_retractions} retractions"
    )


def test_a_chunk_is_as_long_as_there_is_room() -> None:
    scheduler = make_scheduler(5)
    run(scheduler, "B", 40, output=0, computed=10)
    got = scheduled(scheduler.schedule())
    assert got == [("B", 10)], (
        f"B has 2 slots in its third page, and 2 pages of 4 are free: a chunk of 10, not {got}"
    )


def test_the_oldest_moves_when_chunks_have_filled_the_pool() -> None:
    """No request decodes; two half-computed prompts hold all pages: one must be retracted."""
    scheduler = make_scheduler(8)
    run(scheduler, "A", 30, output=0, computed=16)
    run(scheduler, "B", 30, output=0, computed=16)
    got = scheduled(scheduler.schedule())
    assert got == [("A", 14)] and names(scheduler.waiting) == "B", (
        f"I5: B, the newest, is retracted for A; scheduled {got}; {show(scheduler)}"
    )


def test_a_retracted_request_is_not_in_the_step() -> None:
    """A retracted request may join the same step if there is memory; here there is none."""
    scheduler = make_scheduler(4)
    scheduler.admission.new_token_ratio = 1.0
    run(scheduler, "A", 8)
    run(scheduler, "B", 8)
    got = scheduled(scheduler.schedule())
    assert got == [("A", 1)], f"A takes a page of B; B waits and computes nothing: {got}"


def test_the_ratio_decays_while_all_goes_well() -> None:
    scheduler = make_scheduler(100)
    run(scheduler, "A", 5)
    before = scheduler.admission.new_token_ratio
    scheduler.schedule()
    after = scheduler.admission.new_token_ratio
    assert after == pytest.approx(before - RATIO_DECAY), (
        f"a step without retraction lowers {before} by {RATIO_DECAY}: {after}"
    )


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
        assert decoding <= got, f"I5: {decoding} decode in each step beside the chunks; got {got}"


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
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(8), f"{i}")
    finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
    for i in range(len(PROMPTS)):
        assert_one_answer("tiny-llama", finals[f"{i}"], 8)
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
    assert most == 16, f"each request needs 12 of 256 slots: all 16 run at once, not {most}"
