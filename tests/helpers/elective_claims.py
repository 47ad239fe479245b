"""What the answers to the predictions of the electives say, and functions that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common import PoolingParams
from tests.exercises import test_embedding_1 as embedding_1
from tests.exercises import test_embedding_2 as embedding_2
from tests.exercises import test_hybrid_memory_1 as hybrid_memory_1
from tests.exercises import test_hybrid_memory_2 as hybrid_memory_2
from tests.exercises import test_hybrid_memory_3 as hybrid_memory_3
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
from tests.exercises.by_hand import make_request, watch
from tests.helpers.fake_grammars import END


def a_plan_of_two_requests(_: pytest.MonkeyPatch) -> None:
    scheduler = multi_step_1.make_scheduler()
    a, b = make_request("a", [1, 2], max_tokens=4), make_request("b", [3], max_tokens=6)
    multi_step_1.decoding(scheduler, a, b)
    assert [r.max_num_tokens - r.num_tokens for r in (a, b)] == [3, 5], "tokens left"
    steps = multi_step_1.plan(scheduler)
    assert len(steps) == 5 and sum(map(len, steps)) == 8
    assert [("a" in step) for step in steps] == [True, True, True, False, False]


def pages_of_an_early_end(_: pytest.MonkeyPatch) -> None:
    steps, (a,) = multi_step_2.planned(4, "a")
    kv_cache = steps.kv_cache
    assert kv_cache.page_size == 2
    assert [batch.num_scheduled_tokens for batch in steps.batches] == [[1]] * 4
    steps.retreat()
    first = a.num_computed_tokens
    assert [first + number for number in range(4)] == [2, 3, 4, 5], "the steps write here"
    for number in range(4):
        batch = steps.batches[0]
        steps.advance(batch)
        steps.complete(batch)
        if number == 0:
            multi_step_2.end(steps, a)
        held = len(kv_cache.pages_of(a)) if a.row is not None else 0
        assert held == (3 if number < 3 else 0), f"after step {number + 1}"


def the_latest_match(_: pytest.MonkeyPatch) -> None:
    text = [1, 2, 8, 1, 2, 9, 1, 2]
    assert speculative_1.propose(text, 4, (2,))[0] == 9
    earlier = [start for start in range(len(text) - 2) if text[start : start + 2] == [1, 2]]
    assert [text[start + 2] for start in earlier] == [8, 9], "both occurrences match"


def a_step_with_a_wrong_draft(_: pytest.MonkeyPatch) -> None:
    engine: Any = speculative_2.made({3})  # of the drafts 1 to 4 of the first step with drafts
    engine.step()
    [request] = engine.core.scheduler.running
    before = (request.num_output_tokens, request.num_computed_tokens)
    counted = engine.stats().num_draft_tokens
    engine.step()
    after = (request.num_output_tokens, request.num_computed_tokens)
    assert engine.stats().num_draft_tokens - counted == 4
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 3]
    assert request.num_tokens - request.num_computed_tokens == 1, "the newest is not computed"
    engine.close()


def grammars_in_another_order(_: pytest.MonkeyPatch) -> None:
    manager, compiler = structured_output_1.make_manager()
    requests = [structured_output_1.added(manager, name, i) for i, name in enumerate("abc")]
    compiler.finish(2)
    compiler.finish(1)
    assert structured_output_1.taken(manager) == [("b", None), ("c", None)]
    assert [*manager.queue] == requests[:1], "a is still in the queue of grammars"
    assert requests[0] not in manager.grammars


def calls_under_a_grammar(_: pytest.MonkeyPatch) -> None:
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


def copies_in_four_host_pages(_: pytest.MonkeyPatch) -> None:
    cache = priority_1.make_cache(4)
    for tokens, first, count in ((priority_1.A, 40, 3), (priority_1.B, 50, 2)):
        assert len(priority_1.cached(cache, tokens, first)) == count
        cache.evict(count)
    assert priority_1.copied(cache, priority_1.B) == [True, True]
    assert priority_1.copied(cache, priority_1.A) == [True, True, False]


def requests_that_make_way(_: pytest.MonkeyPatch) -> None:
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


def vectors_of_three_tokens(_: pytest.MonkeyPatch) -> None:
    states = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    rows = embedding_1.pooling.pool(states, [slice(0, 2), slice(2, 3)]).tolist()
    mean, last = [(rows[0], 0), (rows[1], 2)], [(rows[1], 2)]
    assert embedding_1.vector("MEAN", mean, 3, normalize=True) == [0.6, 0.8]
    assert embedding_1.vector("MEAN", mean, 3, normalize=True, dimensions=1) == [1.0]
    assert embedding_1.vector("LAST", last, 3, normalize=True) == [0.0, 0.0]


def a_prompt_that_is_sent_again(_: pytest.MonkeyPatch) -> None:
    parts = ((0, 3), (3, 3), (6, 2))
    for kind, steps, computed in (("MEAN", 3, 8), ("LAST", 1, 2)):
        read = [bool(embedding_2.planned(kind, *part)[0]) for part in parts]
        assert read == [False] * (3 - steps) + [True] * steps
        engine, params = embedding_2.made(), PoolingParams(kind)  # type: ignore[arg-type]
        for _again in range(2):
            before = engine.stats().prefill_tokens
            engine.embed([embedding_2.PROMPT], params, progress=False)
        assert engine.stats().prefill_tokens - before == computed


def pages_in_a_window(_: pytest.MonkeyPatch) -> None:
    table = hybrid_memory_1.make_table()
    assert (hybrid_memory_1.WINDOW, hybrid_memory_1.PAGE_SIZE) == (8, 4)
    hybrid_memory_1.add_blocks(table, 4)
    for num_tokens, blocks in ((10, [0, 1, 2]), (11, [1, 2]), (16, [2, 3])):
        table.slide(0, num_tokens, 0)
        held = [i for i, has_page in enumerate(hybrid_memory_1.held(table)) if has_page]
        assert held[: len(blocks)] == blocks, f"after {num_tokens} tokens"


def sixteen_tokens_or_none(_: pytest.MonkeyPatch) -> None:
    cache = hybrid_memory_2.make_cache()
    assert (hybrid_memory_2.WINDOW, hybrid_memory_2.PAGE_SIZE) == (8, 4)
    blocks = hybrid_memory_2.cached(cache, hybrid_memory_2.TOKENS)
    hybrid_memory_2.lose(cache, *blocks[:2])
    prompts = [[*hybrid_memory_2.TOKENS, 1, 2, 3, 4], hybrid_memory_2.TOKENS]
    # The last token of a prompt is always computed, so the cache serves whole blocks before it.
    served = [prompt[: (len(prompt) - 1) // 4 * 4] for prompt in prompts]
    assert [hybrid_memory_2.found(cache, tokens) for tokens in served] == [16, 0]


def chunks_that_leave_states(_: pytest.MonkeyPatch) -> None:
    assert hybrid_memory_3.PAGE_SIZE == 4
    slots, request = hybrid_memory_3.make_slots(20, num_known=2)
    assert hybrid_memory_3.ends(slots, request, budget=12) == [8, 16, 20]
    assert max(end for end in (8, 16) if end <= (20 - 1) // 4 * 4) == 16


def adapters_in_two_slots(_: pytest.MonkeyPatch) -> None:
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


def rows_of_a_mixed_batch(_: pytest.MonkeyPatch) -> None:
    groups = lora_2.grouped([0, 1, 1, 2, 0, 1])
    assert groups == {1: [1, 2, 5], 2: [3]}
    assert 2 * len(groups) == 4, "products of two matrices for each group"
    weights = lora_2.make_weights(3, rank=8, width=576, out=576)
    assert weights.a[1].numel() + weights.b[1].numel() == 9216
    assert 576 * 576 // 9216 == 36


CLAIMS: dict[str, tuple[list[str], Callable[[pytest.MonkeyPatch], None]]] = {
    "embedding.1": (["`MEAN` gives (0.6, 0.8), and with one dimension (1)",
                     "`LAST` gives (0, 0)"], vectors_of_three_tokens),
    "embedding.2": (["`MEAN` in all three steps, and `LAST` only in the third",
                     "`MEAN` computes eight tokens, and `LAST` two"], a_prompt_that_is_sent_again),
    "multi_step.1": (["Five steps and eight tokens", "leaves the plan after its third token"],
                     a_plan_of_two_requests),
    "multi_step.2": (["Three pages, for 2 + 4 tokens", "until the fourth step has ended",
                      "write at positions 2 to 5"], pages_of_an_early_end),
    "speculative.1": (["9. Both earlier occurrences", "the latest counts"], the_latest_match),
    "speculative.2": (["Three tokens: two accepted drafts", "Three computed tokens, too",
                       "newest token is not computed yet"], a_step_with_a_wrong_draft),
    "structured_output.1": (["b before c", "a stays in the queue of grammars"],
                            grammars_in_another_order),
    "structured_output.2": (
        ["`launch sample`, three times `launch accept sample`, and `launch accept`",
         "takes the end-of-sequence token", "is undone, and it is never sampled"],
        calls_under_a_grammar,
    ),
    "lora.1": (["C joins and gets the slot of B", "B waits, and the base request joins"],
               adapters_in_two_slots),
    "lora.2": (["Four small products", "rows 1, 2 and 5", "9,216 numbers, a 36th"],
               rows_of_a_mixed_batch),
    "priority.1": (["Both pages of B, and the first two of A", "last page of A is dropped"],
                   copies_in_four_host_pages),
    "priority.2": (["One, and two", "only one page becomes free"], requests_that_make_way),
    "hybrid_memory.1": (["After 10 tokens blocks 0, 1 and 2", "after 11 blocks 1 and 2",
                         "after 16 blocks 2 and 3"], pages_in_a_window),
    "hybrid_memory.2": (["The first one finds 16 tokens, and the second one none"],
                        sixteen_tokens_or_none),
    "hybrid_memory.3": (["After 8, 16 and 20 tokens", "The second prompt finds 16 tokens"],
                        chunks_that_leave_states),
}  # fmt: skip
