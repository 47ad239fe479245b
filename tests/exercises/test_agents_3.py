"""agents.3: a conversation's past pauses say how long the next one will be."""

from __future__ import annotations

import math

import pytest

from common import AgentHint, Request
from milestones.electives.agents.conversations import PATIENCE, Conversations
from milestones.electives.agents.hi_radix_cache import HiRadixCache
from milestones.electives.agents.pause_estimate import FIRST_GUESS, SHORTEST, PauseEstimate
from tests.exercises.by_hand import make_request

TOKENS = [1, 1, 2, 2]


def observed(*pauses: float) -> PauseEstimate:
    estimate = PauseEstimate()
    for pause in pauses:
        estimate.observe(pause)
    return estimate


class Talks:
    """Conversations over a tree with one prefix, at a time that a test sets."""

    def __init__(self) -> None:
        self.time = 0.0
        self.cache = HiRadixCache(page_size=2)
        self.node = self.cache.insert(TOKENS, [10, 11])
        self.talks = Conversations(self.cache)
        self.talks.use_clock(lambda: self.time)

    def call(self, hint: AgentHint | None) -> Request:
        request = make_request("r", TOKENS)
        request.agent_hint = hint
        self.talks.arrive(request)
        self.talks.resume(request)
        return request

    def ended(self, hint: AgentHint | None, reason: str = "stop") -> None:
        """Serve a call that ends at once, for this reason."""
        request = self.call(hint)
        request.finish_reason = reason  # type: ignore[assignment]
        self.talks.pause(request, self.node)


def test_a_pause_counts_by_its_logarithm() -> None:
    estimate = observed(1.0, 100.0)
    assert estimate.count == 2
    assert estimate.log_sum == pytest.approx(math.log(100.0))


def test_a_pause_of_no_time_is_a_short_one() -> None:
    """Its logarithm would be infinite."""
    assert observed(0.0).log_sum == pytest.approx(math.log(SHORTEST))


def test_one_long_pause_does_not_move_the_estimate_far() -> None:
    """The mean of these pauses is 20 s, and nine of ten take 1 s."""
    expected = observed(*[1.0] * 9, 191.0).expected(observed(*[1.0] * 50))
    assert 1.0 < expected < 2.0


def test_before_any_pause_the_first_guess_counts() -> None:
    assert PauseEstimate().expected() == pytest.approx(FIRST_GUESS)
    assert observed(4.0).expected() == pytest.approx(math.sqrt(4.0 * FIRST_GUESS))


def test_a_new_conversation_pauses_as_all_others() -> None:
    everyone = observed(*[3.0] * 1000)
    assert PauseEstimate().expected(everyone) == pytest.approx(3.0, rel=0.01)


def test_own_pauses_count_more_with_each_one() -> None:
    """All others pause for one second, this conversation for 100."""
    everyone = observed(*[1.0] * 1000)
    found = [observed(*[100.0] * n).expected(everyone) for n in range(4)]
    assert found == pytest.approx([1.0, 10.0, 100 ** (2 / 3), 100 ** (3 / 4)], rel=0.02)


def test_the_estimate_says_when_a_conversation_returns() -> None:
    run = Talks()
    run.ended(AgentHint("talk"))
    run.time = 4.0
    run.ended(AgentHint("talk"))
    talk = run.talks.known["talk"]
    expected = talk.estimate.expected(run.talks.everyone)
    pause = run.cache.pauses["talk"]
    assert pause.returns_at == pytest.approx(4.0 + expected)
    assert pause.protected_until == pytest.approx(4.0 + PATIENCE * expected)
    assert (talk.estimate.count, talk.paused_at) == (1, 4.0)


def test_a_hint_is_better_than_an_estimate() -> None:
    run = Talks()
    run.time = 1.0
    run.ended(AgentHint("talk", expected_pause=7.0))
    pause = run.cache.pauses["talk"]
    assert (pause.returns_at, pause.protected_until) == (8.0, 1.0 + PATIENCE * 7.0)


def test_a_time_to_live_alone_says_not_when() -> None:
    run = Talks()
    run.ended(AgentHint("talk", ttl=30.0))
    pause = run.cache.pauses["talk"]
    assert (pause.returns_at, pause.protected_until) == (math.inf, 30.0)


def test_a_time_to_live_bounds_the_protection() -> None:
    run = Talks()
    run.ended(AgentHint("talk", expected_pause=7.0, ttl=9.0))
    pause = run.cache.pauses["talk"]
    assert (pause.returns_at, pause.protected_until) == (7.0, 9.0)


def test_a_release_ends_the_conversation() -> None:
    run = Talks()
    run.ended(AgentHint("talk"))
    run.ended(AgentHint("talk", release=True))
    assert run.cache.pauses == {} and run.talks.known == {}
    assert run.node.last_used == 0, "its pages go first"


def test_an_aborted_call_is_not_continued() -> None:
    run = Talks()
    run.ended(AgentHint("talk"), "abort")
    assert run.cache.pauses == {} and run.talks.known == {}


def test_a_request_without_a_hint_changes_nothing() -> None:
    run = Talks()
    before = run.node.last_used
    run.ended(None)
    assert run.cache.pauses == {} and run.talks.known == {} and run.node.last_used == before
    run.ended(AgentHint("talk"))
    assert list(run.cache.pauses) == ["talk"]
