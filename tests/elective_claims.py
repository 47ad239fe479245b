"""What the answers to the predictions of the electives say, and functions that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.exercises import test_multi_step_1 as multi_step_1
from tests.exercises import test_multi_step_2 as multi_step_2
from tests.exercises import test_speculative_1 as speculative_1
from tests.exercises import test_speculative_2 as speculative_2
from tests.exercises.requests import request_of


def a_plan_of_two_requests(_: pytest.MonkeyPatch) -> None:
    scheduler = multi_step_1.make_scheduler()
    a, b = request_of("a", [1, 2], 4), request_of("b", [3], 6)
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
    [request] = engine.scheduler.running
    before = (request.num_output_tokens, request.num_computed_tokens)
    counted = engine.stats().num_draft_tokens
    engine.step()
    after = (request.num_output_tokens, request.num_computed_tokens)
    assert engine.stats().num_draft_tokens - counted == 4
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 3]
    assert request.num_tokens - request.num_computed_tokens == 1, "the newest is not computed"
    engine.close()


CLAIMS: dict[str, tuple[list[str], Callable[[pytest.MonkeyPatch], None]]] = {
    "multi_step.1": (["Five steps and eight tokens", "leaves the plan after its third token"],
                     a_plan_of_two_requests),
    "multi_step.2": (["Three pages, for 2 + 4 tokens", "until the fourth step has ended",
                      "write at positions 2 to 5"], pages_of_an_early_end),
    "speculative.1": (["9. Both earlier occurrences", "the latest counts"], the_latest_match),
    "speculative.2": (["Three tokens: two accepted drafts", "Three computed tokens, too",
                       "newest token is not computed yet"], a_step_with_a_wrong_draft),
}  # fmt: skip
