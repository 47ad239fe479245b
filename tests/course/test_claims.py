"""The predictions of the handouts are true: each answer is run. m1 to m3.

An entry has the words of the answer, and the functions that run what they say. `upper_claims.py`
has those of m4 and m5, and `elective_claims.py` those of the electives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from m1_single import LLMEngine as M1Engine
from m2_continuous.kv_pool import KVPool
from m3_paged.triton_ops import split_size
from milestones.course import catalog
from tests.conftest import ROOT, build_engine, shared_model
from tests.exercises import test_m1_1 as m1_1
from tests.exercises import test_m1_4 as m1_4
from tests.exercises import test_m2_1 as m2_1
from tests.exercises import test_m2_2 as m2_2
from tests.exercises import test_m2_4 as m2_4
from tests.exercises import test_m3_1 as m3_1
from tests.exercises import test_m3_2 as m3_2
from tests.exercises.by_hand import break_next_forward, names, scheduled
from tests.exercises.paged_states import make_scheduler, run, wait
from tests.helpers import elective_claims, upper_claims
from tests.helpers.oracle import drain, greedy
from tests.helpers.upper_claims import Claim


def fed(engine: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Return how many tokens of a request each step computes."""
    counts, before = [], 0
    engine.add_request(prompt, greedy(max_tokens, ignore_eos=True), "A")
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats()
        counts.append(stats.prefill_tokens + stats.decode_tokens - before)
        before += counts[-1]
    return counts


def only_what_is_new() -> None:
    loaded = shared_model("tiny-llama")
    for use_cache, expected in ((True, [5, 1, 1, 1, 1, 1]), (False, [5, 6, 7, 8, 9, 10])):
        engine = M1Engine(loaded=loaded, use_cache=use_cache)
        seen: list[int] = []
        model = engine.loaded.model
        forward = model.forward

        def watched(*args: Any, forward: Any = forward, seen: Any = seen, **kwargs: Any) -> Any:
            seen.append(int(kwargs["position_ids"][0, -1]) + 1)
            return forward(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "forward", watched)
            assert fed(engine, [1, 2, 3, 4, 5], 6) == expected
        assert seen[-1] == 10  # the query of the last position sees the keys of all before it


def tokens_become_outputs() -> None:
    engine: Any = build_engine("m1_single")
    engine.add_request([1, 2, 3], greedy(2, ignore_eos=True), "A")
    (request,) = engine.core.scheduler.waiting
    seen = []
    for _step in range(2):
        engine.step()
        stats = engine.stats()
        seen.append((request.num_computed_tokens, stats.prefill_tokens, stats.decode_tokens))
    assert seen[0] == (3, 3, 0) and seen[1][1:] == (3, 1)
    assert request.num_tokens == 5 and sum(seen[1][1:]) == 4
    assert not engine.has_unfinished_requests()


def after_a_failure() -> None:
    answers, counts = [], []
    for fails in (False, True):
        engine = m1_4.make_engine()
        engine.add_request([1, 2, 3, 4, 5], greedy(6, ignore_eos=True), "A")
        (request,) = engine.core.scheduler.waiting
        engine.step()
        engine.step()
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                break_next_forward(engine, patch)
                assert engine.step() == [] and request.num_computed_tokens == 0
            before = engine.stats()
            engine.step()
            after = engine.stats()
            counts.append(after.prefill_tokens - before.prefill_tokens)
            counts[0] += after.decode_tokens - before.decode_tokens
        answers.append(drain(engine)["A"][-1].outputs[0].token_ids)
    assert counts == [7] and answers[0] == answers[1]


def rows_without_holes() -> None:
    for order, moves, between in (
        ("BA", [(3, 1, 7), (2, 0, 6)], "A D C"), ("AB", [(3, 0, 7), (2, 1, 6)], "D B C"),
    ):  # fmt: skip
        manager, requests = m2_1.filled({"A": 4, "B": 5, "C": 6, "D": 7})
        manager.free(requests[order[0]])
        assert names(manager.rows) == between
        manager.free(requests[order[1]])
        assert [tuple(move) for move in manager.moves] == moves
        assert names(manager.rows) == ("C D" if order == "BA" else "D C")


def which_may_join() -> None:
    scheduler = m2_2.make_scheduler(10, 2, 2, 30, max_num_batched_tokens=32)
    steps, padding = [], []
    for _step in range(3):
        batch = scheduler.schedule()
        counts = batch.num_scheduled_tokens
        steps.append(scheduled(batch))
        padding.append(len(counts) * max(counts) - sum(counts))
        scheduler.update_from_output(batch, [(9, None)] * len(batch.requests))
    assert steps[:2] == [[("0", 10), ("1", 2), ("2", 2)], [("3", 30)]]
    assert sorted(steps[2]) == [("0", 1), ("1", 1), ("2", 1), ("3", 1)]
    assert padding == [16, 0, 0]


def an_undone_step() -> None:
    engine: Any = build_engine("m2_continuous")
    for name in "AB":
        engine.add_request([1, 2, 3], greedy(9, ignore_eos=True), name)
    engine.step()
    for name in "XY":
        engine.add_request([4, 5, 6], greedy(9, ignore_eos=True), name)
    with pytest.MonkeyPatch.context() as patch:
        break_next_forward(engine, patch)
        engine.step()
    assert names(engine.core.scheduler.waiting) == "X" and not engine.core.scheduler.running
    batches: list[Any] = []
    schedule = engine.core.scheduler.schedule

    def watched() -> Any:
        batches.append(schedule())
        return batches[-1]

    engine.core.scheduler.schedule = watched
    for _step in range(3):
        engine.step()
    steps = [dict(scheduled(batch)) for batch in batches]
    assert steps == [{"X": 3}, {"Y": 3}, {"A": 4, "B": 4, "X": 4, "Y": 4}]
    engine.close()


def padding_is_overwritten() -> None:
    inputs = m2_4.prefill([1, 2, 3], [4])
    assert m2_4.sees(inputs, 1, 0) == [0], "the query of the short prompt sees its own slot only"
    decodes = m2_4.decode(3, 1)
    assert decodes.position_ids.tolist() == [[3], [1]], "its first decode writes slot 1"
    assert m2_4.sees(decodes, 1, 0) == [0, 1]
    assert m2_4.decode(4, 2).position_ids.tolist() == [[4], [2]], "its second decode writes slot 2"


def slots_that_are_read() -> None:
    inputs = m2_4.decode(4, 1, 7)
    mask = inputs.attention_mask
    assert mask.shape[0] * mask.shape[-1] == 24 and KVPool is not None
    assert sum(len(m2_4.sees(inputs, row, 0)) for row in range(3)) == 15


def forwards_for_17_requests() -> None:
    engine: Any = build_engine("m2_continuous", max_num_seqs=16)
    for number in range(17):
        engine.add_request([number + 1, 2], greedy(8, ignore_eos=True), f"{number}")
    drain(engine)
    assert engine.stats().num_steps == 16


def pages_as_a_request_grows() -> None:
    manager, (a,) = m3_1.manager_with("A", size=4)
    seen = []
    for tokens in (8, 9, 10):
        manager.allocate_slots(a, tokens)
        pages = len(manager.pages_of(a))
        seen.append((pages, 4 * pages - tokens))
    assert seen == [(2, 0), (3, 3), (3, 2)]


def slots_of_positions() -> None:
    assert m3_2.PAGES[0][:3] == [7, 2, 9], "row 0 of this runner begins like A's"
    slots = m3_2.prepare((3, 9)).metadata.slot_mapping.tolist()
    assert slots == [31, 8, 9, 10, 11, 36]


def admission() -> None:
    for ratio, pages, fits in ((0.5, (4, 4), True), (1.0, (5, 5), False)):
        scheduler = make_scheduler(8)
        a = run(scheduler, "A", 7, output=1, max_tokens=13)
        assert (a.num_tokens, a.num_computed_tokens, a.max_num_tokens) == (8, 7, 20)
        x = wait(scheduler, "X", 12, max_tokens=8)
        scheduler.admission.new_token_ratio = ratio
        assert scheduler.kv_cache.num_free_pages == 6
        assert tuple(scheduler.admission.expected_pages(r) for r in (a, x)) == pages
        assert scheduler.admission.fits(x, scheduler.running) is fits


def two_retractions() -> None:
    scheduler = make_scheduler(5)
    a, b = run(scheduler, "A", 8), run(scheduler, "B", 8)
    run(scheduler, "C", 3)
    scheduler.admission.new_token_ratio = 0.1
    scheduler.retract_for(a)
    assert names(scheduler.waiting) == "C"
    once = scheduler.admission.new_token_ratio
    scheduler.kv_cache.allocate_slots(a, a.num_computed_tokens + 1)
    scheduler.retract_for(b)
    assert names(scheduler.waiting) == "B C" and scheduler.kv_cache.num_free_pages == 2
    assert scheduler.counters.num_retractions == 2
    assert scheduler.admission.new_token_ratio >= once > 0.1


def pages_before_chunks() -> None:
    scheduler = make_scheduler(60, max_num_batched_tokens=8)
    run(scheduler, "A", 5, max_tokens=40)
    run(scheduler, "B", 5, max_tokens=40)
    wait(scheduler, "X", 20)
    chunks, decodes, sampled = [], 0, ""
    while "X" not in sampled:
        batch = scheduler.schedule()
        counts = dict(scheduled(batch))
        chunks.append(counts.pop("X"))
        decodes += sum(counts.values())
        sampled = names(batch.requests[i] for i in batch.sampled_indices)
        scheduler.update_from_output(batch, [(9, None)] * len(batch.sampled_indices))
    assert chunks == [6, 6, 6, 2] and decodes == 2 * 4


def programs_of_a_decode() -> None:
    requests, kv_heads, contexts = 2, 3, (300, 20)
    size = split_size(requests * kv_heads, max(contexts))
    splits = -(-max(contexts) // size)
    busy = sum(kv_heads * -(-context // size) for context in contexts)
    assert (size, requests * kv_heads * splits, busy) == (64, 30, 18)
    assert 9 // kv_heads == 3, "query heads of one KV head"


CLAIMS: dict[str, Claim] = {
    "m1.1": (["A with 1 token; B waits", "gives A with 8"], [
        partial(m1_1.test_a_step_computes_what_is_not_computed, computed=7, expected=1),
        partial(m1_1.test_a_step_computes_what_is_not_computed, computed=0, expected=8),
        m1_1.test_a_waiting_request_does_not_join_a_running_one,
    ]),
    "m1.2": (["5, 1, 1, 1, 1, 1", "5, 6, 7, 8, 9, 10", "attends to 10 keys"], [only_what_is_new]),
    "m1.3": (["3, 3, 0", "4 of its 5 tokens", "3 and 1"], [tokens_become_outputs]),
    "m1.4": (["7: the prompt and two tokens", "The answer is the same"], [after_a_failure]),
    "m2.1": (
        ["row 3 to row 1, 7 tokens", "rows are A D C", "row 2 to row 0, 6 tokens",
         "rows are C D", "D would have moved to row 0 and then C to row 1"],
        [rows_without_holes],
    ),
    "m2.2": (["30 positions, 16 of them padding", "the prompt of 30, alone",
              "one token of each of the four"], [which_may_join]),
    "m2.3": (["A and B run, and X and Y wait again", "a prefill of X alone",
              "After X the engine tries Y, and then all four"],
             [an_undone_step]),
    "m2.4": (["first decode overwrites", "slot 1", "slot 2"], [padding_is_overwritten]),
    "m2.5": (["8 = 24 are read", "= 15 may be seen"], [slots_that_are_read]),
    "m2.6": (["16 forwards"], [forwards_for_17_requests]),
    "m3.1": (["2 pages, 0 slots", "3 pages, 3 slots", "3 pages, 2 slots"],
             [pages_as_a_request_grows]),
    "m3.2": (["slot 31", "slots 8, 9, 10, 11", "slot 36"], [slots_of_positions]),
    "m3.3": (["2 + 4 = 6 pages", "6 are free: yes", "3 + 5 = 8 pages", "6 are free: no"],
             [admission]),
    "m3.4": (["C is retracted", "B itself is retracted", "The queue is B, C",
              "it expects more of every request"], [two_retractions]),
    "m3.5": (["6, 6, 6, 2", "A and B get four tokens each"], [pages_before_chunks]),
    "m3.6": (["= 30 programs", "15 + 3 = 18", "3 query heads of one KV head"],
             [programs_of_a_decode]),
    **upper_claims.CLAIMS,
    **elective_claims.CLAIMS,
}  # fmt: skip
EXERCISES = {e.id: e for name in catalog.taught_engines(ROOT) for e in catalog.load(name)}


def test_every_prediction_is_run() -> None:
    """Each prediction of a handout has a claim here."""
    assert CLAIMS.keys() == EXERCISES.keys()


@pytest.mark.parametrize("number", CLAIMS)
def test_the_answer_to_a_prediction_is_true(number: str) -> None:
    words, checks = CLAIMS[number]
    answer = " ".join(EXERCISES[number].part("Predict", ROOT)[1].split())
    missing = [phrase for phrase in words if phrase not in answer]
    assert words and not missing, f"the answer of {number} has changed: change its claim too"
    for check in checks:
        check()


def test_the_experiment_of_look_inside_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "milestones/docs/INSIDE.md").read_text(encoding="utf-8")
    exec(text.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.splitlines()[-1] == "True 1", "right, with one retraction"
