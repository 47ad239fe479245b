"""What the answers to the predictions of m4 and m5 say, and functions that run it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from common.config import POLICIES
from m4_radix import scheduler as m4_scheduler
from m4_radix.radix_cache import RadixCache
from m5_overlap.future_map import FutureMap
from m5_overlap.placeholders import placeholder
from m5_overlap.stream import ThreadStream
from milestones.lab.instruments.streams import LateStream
from tests.exercises import test_m4_5 as m4_5
from tests.exercises import test_m5_4 as m5_4
from tests.exercises import test_m5_5 as m5_5
from tests.exercises import test_m5_6 as m5_6
from tests.exercises.by_hand import make_request, watch
from tests.exercises.overlap_states import plan, running, steps_in_flight
from tests.exercises.radix_states import give_row, hang, offer_leaves, picture
from tests.helpers.fake_paged import FakePagedEngine, expected_tokens
from tests.helpers.oracle import greedy


def a_split(_: pytest.MonkeyPatch) -> None:
    tree = RadixCache(page_size=2)
    node = hang(tree, tree.root, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    tree.lock(node)
    tree.lock(node)
    tree.match_prefix([1, 2, 3, 4, 9, 9])
    assert picture(tree) == {
        "1 2 3 4": "pages 7 8, locks 2", "1 2 3 4 / 5 6": "pages 9, locks 2",
    }  # fmt: skip
    assert node.tokens == [5, 6] and node.prefix_pages() == [7, 8, 9]


def locks(_: pytest.MonkeyPatch) -> None:
    tree = RadixCache(page_size=1)
    stem = hang(tree, tree.root, [1, 2], [1, 2])
    leaf = hang(tree, stem, [3], [3])
    tree.lock(leaf)
    tree.lock(stem)
    assert (stem.lock_count, leaf.lock_count, tree.protected_size) == (2, 1, 3)
    tree.unlock(leaf)
    assert (stem.lock_count, leaf.lock_count) == (1, 0)
    assert (tree.protected_size, tree.evictable_size, leaf.in_heap) == (2, 1, True)


def eviction(_: pytest.MonkeyPatch) -> None:
    for count, left in ((3, {"1 2", "1 2 / 5", "6"}), (7, set())):
        tree = RadixCache(page_size=1)
        stem = hang(tree, tree.root, [1, 2], [1, 2], used=9)
        hang(tree, stem, [3, 4], [3, 4], used=5)
        hang(tree, stem, [5], [5], used=9)
        hang(tree, tree.root, [6, 7], [6, 7], used=7)
        taken = offer_leaves(tree).evict(count)
        assert len(taken) == count and set(picture(tree)) == left
        assert {*taken[:2]} == {3, 4} and (taken[2] == 7 or count == 7)
    tree = RadixCache(page_size=1)
    hang(tree, tree.root, [3, 4], [3, 4])
    assert offer_leaves(tree).evict(1) == [4], "the last page goes first"


def engine_m4(num_pages: int, **config: Any) -> FakePagedEngine:
    return FakePagedEngine(m4_scheduler, num_pages, page_size=4, seed=0, **config)


def drained(engine: FakePagedEngine) -> int:
    """Run the engine until all requests have ended. Return the prompt tokens that it reused."""
    while engine.live:
        engine.step()
    return int(engine.scheduler.counters.cached_prompt_tokens)


def the_same_prompt(_: pytest.MonkeyPatch) -> None:
    for length, expected in ((8, [0, 4, 4]), (9, [0, 8, 8])):
        engine, reused = engine_m4(20), [0]
        for number in range(3):
            engine.add(f"{number}", list(range(1, length + 1)), 2)
            reused.append(drained(engine))
        assert [b - a for a, b in pairwise(reused)] == expected


def adoption(_: pytest.MonkeyPatch) -> None:
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


def policies(_: pytest.MonkeyPatch) -> None:
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


def a_failed_work(_: pytest.MonkeyPatch) -> None:
    stream, seen = ThreadStream(), []
    stream.launch(lambda: seen.append(1))
    stream.launch(lambda: seen.append(1 // 0))
    event = stream.launch(seen.clear)
    with pytest.raises(ZeroDivisionError):
        event.wait()
    assert seen == [1]
    stream.synchronize()
    stream.launch(lambda: seen.append(2)).wait()
    assert seen == [1, 2], "after `synchronize`, work runs again"
    stream.close()


def names_for_tokens(_: pytest.MonkeyPatch) -> None:
    steps = steps_in_flight()
    a, chunk, c = (
        running(steps, name, tokens, computed)
        for name, tokens, computed in (("a", [1], 0), ("b", [1] * 8, 0), ("c", [2], 0))
    )
    assert (a.row, chunk.row, c.row) == (0, 1, 2) or {a.row, c.row} <= {0, 1, 2, 3}
    batch = plan(steps, (a, 1), (chunk, 3), (c, 1))
    batch.sampled_indices[:] = [0, 2]
    steps.advance(batch)
    assert [r.token_ids[-1] for r in (a, chunk, c)] == [placeholder(a.row), 1, placeholder(c.row)]
    assert (placeholder(0), placeholder(2)) == (-1, -3)
    future_map = FutureMap(4, torch.device("cpu"))
    future_map.store(torch.tensor([1, 3]), torch.tensor([50, 70]))
    assert future_map.resolve(torch.tensor([-3, -1, 0])).tolist() == [70, 50, 0]


def the_last_step_frees(_: pytest.MonkeyPatch) -> None:
    for ends in ("complete", "undo"):
        steps = steps_in_flight()
        free = steps.kv_cache.num_free_pages
        a = running(steps, "a", [1, 2, 3], computed=2)
        first = plan(steps, (a, 1))
        steps.advance(first)
        second = plan(steps, (a, 1))
        steps.advance(second)
        a.finish_reason = "abort"
        steps.free(a)
        steps.complete(first)
        assert a.row is not None and steps.kv_cache.num_free_pages < free
        if ends == "complete":
            steps.complete(second)
        else:
            steps.undo(second)
        assert a.row is None and steps.kv_cache.num_free_pages == free


def buffers_in_turns(_: pytest.MonkeyPatch) -> None:
    buffers, stream, waits = m5_4.two_buffers(), LateStream(), []
    for step in range(4):
        mine = buffers[step % 2]
        mine.begin()
        waits.append(stream.num_waits)
        mine.in_use = stream.launch(lambda: None)
    assert waits == [0, 0, 1, 2]


def a_padded_batch(_: pytest.MonkeyPatch) -> None:
    runner = m5_5.make_runner()
    inputs = m5_5.padded_input(runner, m5_5.three_decodes(runner))
    meta = inputs.metadata
    assert meta.seq_lens.tolist() == [6, 3, 10, 1]
    assert inputs.input_ids[0, 3] == inputs.position_ids[0, 3] == 0
    assert 0 <= meta.slot_mapping[3] < 4, "a slot of page 0"
    assert meta.page_table.shape == (4, 8) and not meta.page_table[3].any()
    assert runner.graphs.size_for(5) is None


def one_step_behind(_: pytest.MonkeyPatch) -> None:
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


CLAIMS: dict[str, tuple[list[str], Callable[[pytest.MonkeyPatch], None]]] = {
    "m4.1": (["pages `7 8`", "page `9`", "Both nodes have 2 locks", "still `7 8 9`"], a_split),
    "m4.2": (["count of the stem is 2", "count of the leaf is 1", "3 pages are protected",
              "`protected_size` is 2, `evictable_size` is 1", "has been offered"], locks),
    "m4.3": (["`3 4` is the oldest leaf", "so `6` stays cached", "takes everything"], eviction),
    "m4.4": (["8 tokens: 0, 4, 4", "9 tokens: 0, 8, 8"], the_same_prompt),
    "m4.5": (["B's row is `1 2 6`", "Pages 4 and 5 are free", "Two requests hold the node",
              "page 3 becomes free", "it cannot be evicted"], adoption),
    "m4.6": (["reuses 0 of 240", "`lpm` reuses 128", "(40 pages)", "`dfs-weight` reuses 128 too"],
             policies),
    "m5.1": (["raises `ZeroDivisionError`", "The list is `[1]`", "work runs again"],
             a_failed_work),
    "m5.2": (["`-1` for row 0 and `-3` for row 2", "has no placeholder",
              "`resolve` returns `[70, 50, 0]`"], names_for_tokens),
    "m5.3": (["free when step N+1 has ended", "If step N+1 fails"], the_last_step_frees),
    "m5.4": (["0, 0, 1, 2"], buffers_in_turns),
    "m5.5": (["four rows", "token 0 at position 0", "8 columns", "fit no size"],
             a_padded_batch),
    "m5.6": (["launch, wait, four times", "launch, launch, wait, launch, wait, launch, wait, wait",
              "three launches", "nothing is in flight"], one_step_behind),
}  # fmt: skip
