"""What the answers to the predictions of the electives say, and functions that run it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from common import PoolingParams
from milestones.electives.kv_quant.packing import SCALE_BYTES, pack, unpack
from tests.electives import test_invariance as invariance
from tests.exercises import test_agents_1 as agents_1
from tests.exercises import test_agents_2 as agents_2
from tests.exercises import test_agents_3 as agents_3
from tests.exercises import test_disaggregated_1 as disaggregated_1
from tests.exercises import test_disaggregated_2 as disaggregated_2
from tests.exercises import test_embedding_1 as embedding_1
from tests.exercises import test_embedding_2 as embedding_2
from tests.exercises import test_hybrid_memory_1 as hybrid_memory_1
from tests.exercises import test_hybrid_memory_2 as hybrid_memory_2
from tests.exercises import test_hybrid_memory_3 as hybrid_memory_3
from tests.exercises import test_invariance_2 as invariance_2
from tests.exercises import test_invariance_3 as invariance_3
from tests.exercises import test_kv_quant_2 as kv_quant_2
from tests.exercises import test_lora_1 as lora_1
from tests.exercises import test_lora_2 as lora_2
from tests.exercises import test_multi_step_1 as multi_step_1
from tests.exercises import test_multi_step_2 as multi_step_2
from tests.exercises import test_priority_1 as priority_1
from tests.exercises import test_priority_2 as priority_2
from tests.exercises import test_speculative_1 as speculative_1
from tests.exercises import test_speculative_2 as speculative_2
from tests.exercises import test_structured_output_1 as structured_output_1
from tests.exercises import test_structured_output_2 as structured_output_2
from tests.exercises import test_vision_1 as vision_1
from tests.exercises import test_vision_2 as vision_2
from tests.exercises.by_hand import watch
from tests.helpers.fake_grammars import END
from tests.helpers.upper_claims import Claim


def calls_under_a_grammar() -> None:
    engine = structured_output_2.made()
    undone, accepted = list[Any](), list[int | None]()
    watch(engine.core.scheduler, "undo", undone.append)
    watch(engine.core.scheduler.grammars, "accept", lambda _, token_id: accepted.append(token_id))
    structured_output_2.add(engine, "a", salt=1, length=3)
    structured_output_2.tokens_of(engine)
    calls = ["launch sample", *["launch accept sample"] * 3, "launch accept"]
    assert engine.events == " ".join(calls).split()
    assert len(accepted) == 4 and accepted[-1] == END
    assert len(undone) == 1 == engine.events.count("launch") - engine.events.count("sample")


def requests_that_make_way() -> None:
    for num_pages, shared, count in ((20, 0, 1), (8, 6, 2)):
        scheduler = priority_2.make_scheduler(num_pages, max_num_seqs=8)
        if shared:  # a request before them leaves its pages in the tree
            before = priority_2.add(scheduler, "before", [1] * 7, priority=5)
            priority_2.step(scheduler)
            scheduler.finish_request(before, "abort")
            scheduler.admission.new_token_ratio = 0.1  # idle: it began anew
        for name in "abcde":
            prompt = [1] * shared + [ord(name)] * (7 - shared)
            priority_2.add(scheduler, name, prompt, priority=5)
        priority_2.step(scheduler)
        assert [len(scheduler.kv_cache.pages_of(r)) for r in scheduler.running] == [4] * 5
        assert scheduler.kv_cache.num_free_pages == 0
        urgent = priority_2.add(scheduler, "urgent", [9, 8, 7], priority=0)
        assert scheduler.kv_cache.pages_for(urgent.num_tokens) == 2
        assert priority_2.step(scheduler)
        assert scheduler.preemption.num_preemptions == count


def vectors_of_three_tokens() -> None:
    states = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    rows = embedding_1.pooling.pool(states, [slice(0, 2), slice(2, 3)]).tolist()
    mean, last = [(rows[0], 0), (rows[1], 2)], [(rows[1], 2)]
    assert embedding_1.vector("MEAN", mean, 3, normalize=True) == [0.6, 0.8]
    assert embedding_1.vector("MEAN", mean, 3, normalize=True, dimensions=1) == [1.0]
    assert embedding_1.vector("LAST", last, 3, normalize=True) == [0.0, 0.0]


def a_prompt_that_is_sent_again() -> None:
    parts = ((0, 3), (3, 3), (6, 2))
    for kind, steps, computed in (("MEAN", 3, 8), ("LAST", 1, 2)):
        read = [bool(embedding_2.planned(kind, *part)[0]) for part in parts]
        assert read == [False] * (3 - steps) + [True] * steps
        engine, params = embedding_2.made(), PoolingParams(kind)  # type: ignore[arg-type]
        for _again in range(2):
            before = engine.stats().prefill_tokens
            engine.embed([embedding_2.PROMPT], params, progress=False)
        assert engine.stats().prefill_tokens - before == computed


def chunks_that_leave_states() -> None:
    assert hybrid_memory_3.PAGE_SIZE == 4
    slots, request = hybrid_memory_3.make_slots(20, num_known=2)
    assert hybrid_memory_3.ends(slots, request, budget=12) == [8, 16, 20]
    assert max(end for end in (8, 16) if end <= (20 - 1) // 4 * 4) == 16


def a_norm_that_differs_first() -> None:
    alone, among = (invariance.recorded("split_norm", count) for count in (0, 5))
    found = invariance.first_difference(alone, among)
    assert found is not None and found.position == 20
    assert found.operation.startswith("model.layers.0.") and "norm" in found.operation


def parts_of_a_prompt() -> None:
    assert invariance_3.LENGTH == 16
    for context, parts in ((24, 2), (40, 3)):
        found = invariance_3.fixed_split(context, 0, 1)
        assert len(found) == parts
    invariance_3.test_padding_at_the_end_changes_no_bit()
    seen = invariance_3.fixed_split(24, 0, 1)[1]
    assert int((seen < 24).sum()) == 8 == int((seen >= 24).sum())


def products_of_a_step() -> None:
    patch = pytest.MonkeyPatch()
    for rows, products in ((1, 1), (8, 1), (9, 2)):
        assert -(-rows // invariance_2.sums.TILE) == products
        invariance_2.test_each_product_has_the_same_number_of_rows(rows, patch)
    patch.undo()


def numbers_of_a_line() -> None:
    x = torch.tensor([[127, 64.4, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    lines = pack(x)
    assert lines[:, :SCALE_BYTES].contiguous().view(torch.float32).flatten().tolist() == [1, 0]
    assert lines[:, SCALE_BYTES:].tolist() == [[127, 64, 0, 0], [0, 0, 0, 0]]
    off = (unpack(lines) - x).abs()
    torch.testing.assert_close(off, torch.tensor([[0, 0.4, 0.5, 0], [0.0] * 4]))


def queries_behind_a_border() -> None:
    """Of 20 tokens in chunks of 16 and 4, the last four queries see a chunk before their own."""
    earlier = [sum(first for first in (0, 16) if first <= query) for query in range(20)]
    assert [query for query in range(20) if earlier[query]] == [16, 17, 18, 19]
    kv_quant_2.test_a_chunk_border_changes_no_answer(16)


def positions_of_three_prompts() -> None:
    vision_1.test_tokens_after_the_prompt_go_on_from_its_largest_position()


def a_chunk_before_an_image() -> None:
    scheduler, cat = vision_2.scheduler_with(7), vision_2.DOG
    cache = scheduler.encoder_cache
    other = vision_2.request_with("A", vision_2.MAP, 1)
    assert cache.hold(other, vision_2.MAP), "6 of 7 tokens"
    request = vision_2.request_with("B", 1, 2, 3, cat)
    assert scheduler.num_tokens_with_images(request, 7) == 3
    request.num_computed_tokens = 3
    for computed, expected in ((2, 0), (4, 0), (6, 4)):
        other.num_computed_tokens = computed
        cache.release_computed(other)
        assert scheduler.num_tokens_with_images(request, 4) == expected
    assert vision_2.cached(cache) == "dog", "4 and 6 tokens do not fit together"


def adapters_in_two_slots() -> None:
    slots, adapters = lora_1.make_slots(2)
    lora_1.run(slots, adapters["A"])
    slots.use(adapters["A"])
    slots.use(adapters["B"])
    assert slots.can_use(adapters["C"]), "B is idle"
    slots.use(adapters["C"])
    assert lora_1.resident(slots) == "AC"
    lora_1.run(slots, adapters["C"])
    assert not slots.can_use(adapters["B"])
    assert slots.can_use(None)


def rows_of_a_mixed_batch() -> None:
    groups = lora_2.grouped([0, 1, 1, 2, 0, 1])
    assert groups == {1: [1, 2, 5], 2: [3]}
    assert 2 * len(groups) == 4, "products of two matrices for each group"
    weights = lora_2.make_weights(3, rank=8, width=576, out=576)
    assert weights.a[1].numel() + weights.b[1].numel() == 9216
    assert 576 * 576 // 9216 == 36


def pages_of_two_pauses() -> None:
    cache = agents_1.make_cache()
    first, second = ([token] * 8 for token in (1, 2))
    agents_1.paused(cache, "first", first, 10, returns_at=5.0)
    agents_1.paused(cache, "second", second, 20, returns_at=50.0)
    assert cache.evictable_size == 8, "all pages count as free"
    assert sorted(cache.evict(3)) == [21, 22, 23]


def copies_of_two_pauses() -> None:
    cache = agents_2.make_cache(2)
    for tokens, returns_at in ((agents_2.A, 50.0), (agents_2.B, 5.0), (agents_2.C, None)):
        agents_2.add(cache, tokens, returns_at)
        cache.evict(2)
    found = [all(agents_2.copied(cache, tokens)) for tokens in (agents_2.A, agents_2.B, agents_2.C)]
    assert found == [False, True, False]


def one_pause_of_191_seconds() -> None:
    assert (9 * 1 + 191) / 10 == 20
    assert round(math.log(191), 1) == 5.3
    assert agents_3.observed(*[1.0] * 9, 191.0).expected() < 2


CLAIMS: dict[str, Claim] = {
    "agents.1": (["It does not wait", "its last three pages are evicted"], [pages_of_two_pauses]),
    "agents.2": (["Those of the conversation that is expected in 5 s", "the place of neither"],
                 [copies_of_two_pauses]),
    "agents.3": (["The mean is 20 s", "below 2 s", "of the long pause is 5.3"],
                 [one_pause_of_191_seconds]),
    "disaggregated.1": (["The first step sends page 0", "The second step sends pages 1 and 2"], [
        disaggregated_1.test_a_page_is_sent_by_the_step_that_completes_it,
    ]),
    "disaggregated.2": (["Seven pages are free", "all ten are"], [
        disaggregated_2.test_no_other_request_gets_the_pages_of_a_dropped_attempt,
        disaggregated_2.test_a_confirmed_end_frees_the_pages_once,
    ]),
    "embedding.1": (["`MEAN` gives (0.6, 0.8), and with one dimension (1)",
                     "`LAST` gives (0, 0)"], [vectors_of_three_tokens]),
    "embedding.2": (["`MEAN` in all three steps, and `LAST` only in the third",
                     "`MEAN` computes eight tokens, and `LAST` two"],
                    [a_prompt_that_is_sent_again]),
    "multi_step.1": (["Five steps and eight tokens", "leaves the plan after its third token"], [
        multi_step_1.test_a_request_leaves_the_plan_at_max_tokens,
    ]),
    "multi_step.2": (["Three pages, for 2 + 4 tokens", "until the fourth step has ended",
                      "write at positions 2 to 5"], [
        multi_step_2.test_retreating_leaves_the_plan_and_its_pages,
        multi_step_2.test_a_finished_request_keeps_its_pages_until_the_plan_ends,
    ]),
    "speculative.1": (["9. Both earlier occurrences", "the latest counts"], [
        speculative_1.test_of_equal_matches_the_latest_counts,
    ]),
    "speculative.2": (["Three tokens: two accepted drafts", "Three computed tokens, too",
                       "newest token is not computed yet"], [
        partial(speculative_2.test_the_first_wrong_draft_ends_the_run, place=3),
        speculative_2.test_refused_drafts_hold_no_page,
    ]),
    "structured_output.1": (["b before c", "a stays in the queue of grammars"], [
        structured_output_1.test_a_slow_grammar_holds_up_no_other,
    ]),
    "structured_output.2": (
        ["`launch sample`, three times `launch accept sample`, and `launch accept`",
         "takes the end-of-sequence token", "is undone, and it is never sampled"],
        [calls_under_a_grammar],
    ),
    "kv_quant.1": (["The scale is 1, and the integers are 127, 64, 0 and 0",
                    "off by 0, 0.4, 0.5 and 0"], [numbers_of_a_line]),
    "kv_quant.2": (["Those of the last four tokens"], [queries_behind_a_border]),
    "vision.1": (["position 11", "index 24 and position 12", "9 would follow"],
                 [positions_of_three_prompts]),
    "vision.2": (["Three tokens", "after A has computed its image", "6 and 4 tokens do not fit"],
                 [a_chunk_before_an_image]),
    "lora.1": (["C joins and gets the slot of B", "B waits, and the base request joins"],
               [adapters_in_two_slots]),
    "lora.2": (["Four small products", "rows 1, 2 and 5", "9,216 numbers, a 36th"],
               [rows_of_a_mixed_batch]),
    "priority.1": (["Both pages of B, and the first two of A", "last page of A is dropped"], [
        priority_1.test_a_full_host_drops_the_copies_that_were_used_longest_ago,
    ]),
    "priority.2": (["One, and two", "only one page becomes free"], [requests_that_make_way]),
    "hybrid_memory.1": (["After 10 tokens blocks 0, 1 and 2", "after 11 blocks 1 and 2",
                         "after 16 blocks 2 and 3"], [
        hybrid_memory_1.test_a_page_is_free_when_no_query_sees_it,
        hybrid_memory_1.test_a_page_is_freed_once,
    ]),
    "hybrid_memory.2": (["The first one finds 16 tokens, and the second one none"], [
        hybrid_memory_2.test_requests_find_what_can_be_resumed,
    ]),
    "hybrid_memory.3": (["After 8, 16 and 20 tokens", "The second prompt finds 16 tokens"],
                        [chunks_that_leave_states]),
    "invariance.1": (["At position 20", "a norm of layer 0"], [a_norm_that_differs_first]),
    "invariance.2": (["One, one and two", "one row computes eight"], [products_of_a_step]),
    "invariance.3": (["Two and three", "8 positions and 8 of padding"], [parts_of_a_prompt]),
}  # fmt: skip
