"""What the answers to the predictions of m4 and m5 say, and functions that run it.

If a test of the exercise states what an answer says, the test itself is the function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.config import POLICIES
from m4_radix import scheduler as m4_scheduler
from m4_radix.radix_cache import RadixCache
from m5_overlap.stream import ThreadStream
from milestones.lab.instruments.streams import LateStream
from tests.engine.test_stream import test_what_follows_a_failure_fails_unrun
from tests.exercises import test_m4_1 as m4_1
from tests.exercises import test_m4_3 as m4_3
from tests.exercises import test_m4_5 as m4_5
from tests.exercises import test_m4_6 as m4_6
from tests.exercises import test_m5_2 as m5_2
from tests.exercises import test_m5_3 as m5_3
from tests.exercises import test_m5_4 as m5_4
from tests.exercises import test_m5_5 as m5_5
from tests.exercises import test_m5_6 as m5_6
from tests.exercises.by_hand import make_request, watch
from tests.exercises.overlap_states import plan, running, steps_in_flight
from tests.exercises.radix_states import give_row, hang, picture
from tests.helpers.fake_paged import FakePagedEngine, expected_tokens
from tests.helpers.oracle import greedy

# The words of the answer, and what is called to see that they are true.
Claim = tuple[list[str], list[Callable[[], object]]]


def locks() -> None:
    tree = RadixCache(page_size=1)
    stem = hang(tree, tree.root, [1, 2], [1, 2])
    leaf = hang(tree, stem, [3], [3])
    tree.lock(leaf)
    tree.lock(stem)
    assert (stem.lock_count, leaf.lock_count, tree.protected_size) == (2, 1, 3)
    tree.unlock(leaf)
    assert (stem.lock_count, leaf.lock_count) == (1, 0)
    assert (tree.protected_size, tree.evictable_size, leaf.in_heap) == (2, 1, True)


def eviction() -> None:
    for bites, taken, left in (
        ([1], [4], ["1 2", "1 2 / 3", "1 2 / 5", "6 7"]),
        ([3], [3, 4, 7], ["1 2", "1 2 / 5", "6"]),
        ([7], [1, 2, 3, 4, 5, 6, 7], []),
    ):  # type: tuple[list[int], list[int], list[str]]
        m4_3.test_the_leaf_used_longest_ago_goes_first(bites, taken, left)


def engine_m4(num_pages: int, **config: Any) -> FakePagedEngine:
    return FakePagedEngine(m4_scheduler, num_pages, page_size=4, seed=0, **config)


def drained(engine: FakePagedEngine) -> int:
    """Run the engine until all requests have ended. Return the prompt tokens that it reused."""
    while engine.live:
        engine.step()
    return int(engine.scheduler.counters.cached_prompt_tokens)


def adoption() -> None:
    kv_cache = m4_5.manager()
    a, b = (make_request(name, list(range(1, 11))) for name in "ab")
    assert give_row(kv_cache, a, 9) == [1, 2, 3] and give_row(kv_cache, b, 9) == [4, 5, 6]
    kv_cache.insert(a)
    kv_cache.insert(b)
    assert list(kv_cache.pages_of(b)) == [1, 2, 6]
    assert {4, 5} <= set(kv_cache.allocator.free_pages)
    assert set(picture(kv_cache.radix_cache).values()) == {"pages 1 2, locks 2"}
    kv_cache.free(a)
    assert 3 in kv_cache.allocator.free_pages
    assert set(picture(kv_cache.radix_cache).values()) == {"pages 1 2, locks 1"}
    assert kv_cache.radix_cache.evictable_size == 0


def policies() -> None:
    expected = {"fcfs": 0, "lpm": 128, "dfs-weight": 128}
    for policy in (name for name in POLICIES if name in expected):
        for pages in (14, 40):
            engine = engine_m4(pages, max_num_seqs=1, schedule_policy=policy)
            for number in range(12):
                stem = [1 + number % 4] * 18
                engine.add(f"{number}", [*stem, 20 + number, 30 + number], 1)
            reused = drained(engine)
            if pages == 14:
                assert reused == expected[policy], policy
            elif policy == "lpm":
                assert reused == 128, "as many as with memory for everything"


def a_failed_work() -> None:
    stream = ThreadStream()
    test_what_follows_a_failure_fails_unrun(stream)
    stream.close()


def names_for_tokens() -> None:
    steps = steps_in_flight()
    a, chunk, c = (running(steps, name, [1] * 8, computed=0) for name in "abc")
    assert (a.row, chunk.row, c.row) == (0, 1, 2)
    del a.token_ids[1:], c.token_ids[1:]
    steps.advance(plan(steps, a, (chunk, 3), c))
    assert [request.token_ids[-1] for request in (a, chunk, c)] == [-1, 1, -3]
    futures = m5_2.stored(row0=50, row2=70)
    assert futures.resolve(torch.tensor([-3, -1, 0])).tolist() == [70, 50, 0]


def a_padded_batch() -> None:
    runner = m5_5.make_runner()
    m5_5.test_a_decode_batch_is_laid_out_and_padded(runner)
    m5_5.test_padding_writes_to_the_padding_page(runner)
    assert (m5_5.MAX_MODEL_LEN, m5_5.PAGE_SIZE) == (30, 4)
    mode, _ = runner.graphs.dispatch(m5_5.decodes(5))
    assert mode is m5_5.CUDAGraphMode.NONE


def one_step_behind() -> None:
    serial, overlapped = "launch wait " * 4, "launch launch wait launch wait launch wait wait "
    for overlap, expected in ((False, serial), (True, overlapped)):
        assert _calls(overlap, [])[0] == expected.split()
    answer = expected_tokens([1, 2], 4)
    calls, left = _calls(True, [answer[1]])
    assert calls.count("launch") == 3 and left == 0


def _calls(overlap: bool, stops: list[int]) -> tuple[list[str], int]:
    """Return the launches and waits of a run, and the steps in flight after its final output."""
    engine = m5_6.engine_of(LateStream(), enable_overlap=overlap)
    calls: list[str] = []
    watch(engine.core.runner, "launch", lambda *_: calls.append("launch"))
    watch(engine.core, "wait", lambda *_: calls.append("wait"))
    engine.add_request([1, 2], greedy(4, ignore_eos=True, stop_token_ids=stops), "A")
    while not any(output.finished for output in engine.step()):
        pass
    return calls, len(engine.core.result_queue)


CLAIMS: dict[str, Claim] = {
    "m4.1": (["pages `7 8`", "page `9`", "Both nodes have 2 locks", "still `7 8 9`"], [
        m4_1.test_a_split_hands_its_locks_on,
        m4_1.test_a_handle_from_before_a_split_still_spells_its_prefix,
    ]),
    "m4.2": (["count of the stem is 2", "count of the leaf is 1", "3 pages are protected",
              "`protected_size` is 2, `evictable_size` is 1", "has been offered"], [locks]),
    "m4.3": (["`3 4` is the oldest leaf", "so `6` stays cached", "takes everything"], [eviction]),
    "m4.4": (["8 tokens: 0, 4, 4", "9 tokens: 0, 8, 8"], [
        partial(m4_6.test_the_same_prompt_three_times, length) for length in (8, 9)
    ]),
    "m4.5": (["B's row is `1 2 6`", "Pages 4 and 5 are free", "Two requests hold the node",
              "page 3 becomes free", "it cannot be evicted"], [adoption]),
    "m4.6": (["reuses 0 of 240", "`lpm` reuses 128", "(40 pages)", "`dfs-weight` reuses 128 too"],
             [policies]),
    "m5.1": (["raises `ZeroDivisionError`", "The list is `[1]`", "work runs again"],
             [a_failed_work]),
    "m5.2": (["`-1` for row 0 and `-3` for row 2", "has no placeholder",
              "`resolve` returns `[70, 50, 0]`"], [names_for_tokens]),
    "m5.3": (["free when step N+1 has ended", "If step N+1 fails"], [
        m5_3.test_the_last_of_two_steps_counts,
        m5_3.test_undo_leaves_an_ended_request_alone_and_frees_it,
    ]),
    "m5.4": (["0, 0, 1, 2"], [m5_4.test_no_step_waits_for_more_than_the_step_before_last]),
    "m5.5": (["four rows", "token 0 at position 0", "3 columns", "static table has 8",
              "fit no size"], [a_padded_batch]),
    "m5.6": (["launch, wait, four times", "launch, launch, wait, launch, wait, launch, wait, wait",
              "three launches", "nothing is in flight"], [one_step_behind]),
}  # fmt: skip
