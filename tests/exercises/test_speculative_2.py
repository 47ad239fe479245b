"""speculative.2: drafts are accepted up to the first that is wrong, and refused ones leave."""

from __future__ import annotations

from typing import Any

import pytest

from milestones.electives.speculative import engine as engine_module
from milestones.lab.instruments.streams import LateStream
from tests.helpers.fake_overlap import hash_engine
from tests.helpers.fake_paged import expected_tokens
from tests.helpers.oracle import greedy

PROMPT = [3, 1, 4]
OUTPUT = expected_tokens(PROMPT, 30)


class Given:
    """A drafter with a text: it proposes what follows there, with some tokens changed."""

    def __init__(self, wrong: set[int] | None = None) -> None:
        self.text = [t + 50 if i in (wrong or set()) else t for i, t in enumerate(OUTPUT)]

    def propose(self, request: Any, count: int) -> list[int]:
        done = request.num_output_tokens
        return self.text[done : done + count]


def made(wrong: set[int] | None = None, max_tokens: int = 21, **params: Any) -> Any:
    """Return an engine with one request. Tokens at the places in `wrong` are drafted wrong."""
    engine = hash_engine(engine_module, LateStream(), 60, page_size=1, max_num_seqs=2)
    engine.core.scheduler.drafting.drafter = Given(wrong)
    engine.add_request(PROMPT, greedy(max_tokens, ignore_eos=True, **params), "r")
    return engine


def lengths(engine: Any) -> list[int]:
    """Run to the end. Return the number of output tokens after each step; check all tokens."""
    found = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
            assert tokens == OUTPUT[: len(tokens)], f"I1: the model says {OUTPUT}, not {tokens}"
            found.append(len(tokens))
    return found


def test_right_drafts_are_all_accepted() -> None:
    assert lengths(made()) == [1, 6, 11, 16, 21], "four drafts and one more token in a step"


def test_the_output_has_all_new_tokens() -> None:
    """I6: a stream shows the tokens of the outputs, one output for each step."""
    engine = made()
    engine.core.step()
    (output,) = engine.core.step()
    found = [token for token, _logprobs in output.new_tokens]
    assert found == OUTPUT[1:6], "the second step has appended five tokens: verify returns them all"


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_the_first_wrong_draft_ends_the_run(place: int) -> None:
    """The model's own token takes its place; what was computed after it is worth nothing."""
    found = lengths(made({place}))
    assert found[:3] == [1, place + 1, min(21, place + 6)], f"draft {place} is wrong: {found}"


def test_wrong_drafts_give_one_token_a_step() -> None:
    assert lengths(made(set(range(30)), max_tokens=6)) == [1, 2, 3, 4, 5, 6], "every draft is wrong"


def test_nothing_comes_after_the_end() -> None:
    """I6: a request that stops within a run ends there, although more drafts are right."""
    engine = made(stop_token_ids=[OUTPUT[2]])
    expected = OUTPUT.index(OUTPUT[2]) + 1
    found = lengths(engine)
    assert found[-1] == expected, f"the stop token is number {expected}: {found}"


def test_refused_drafts_hold_no_page() -> None:
    """I3: a page of one token for each computed token, and no more."""
    engine = made({2, 7, 8})
    [request] = engine.core.scheduler.waiting
    while engine.has_unfinished_requests():
        engine.step()
        if request.row is not None:
            held = len(engine.core.scheduler.kv_cache.pages_of(request))
            computed = request.num_computed_tokens
            assert (held, computed) == (request.num_tokens - 1, request.num_tokens - 1), (
                f"I3: {request.num_tokens} tokens, {computed} computed, {held} pages"
            )


def test_accepted_drafts_are_counted() -> None:
    engine = made({2})
    lengths(engine)
    stats = engine.stats()
    counted = (stats.num_draft_tokens, stats.num_accepted_tokens, stats.decode_tokens)
    assert counted[2] == 20, (
        f"20 tokens come after the first one: (drafts, accepted, decoded) are {counted}"
    )
    assert stats.padding_tokens == counted[0] - counted[1], (
        f"the drafts that were not accepted are padding: (drafts, accepted, decoded) are {counted}"
    )
    assert stats.num_steps == 1 + 20 - counted[1], "an accepted draft saves a step"
