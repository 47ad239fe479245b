"""speculative.1: prompt lookup guesses what followed the newest tokens before."""

from __future__ import annotations

import pytest

from milestones.electives.speculative.drafter import NGramDrafter
from tests.exercises.requests import request_of


def propose(tokens: list[int], count: int, sizes: tuple[int, ...] = (3, 2)) -> list[int]:
    return NGramDrafter(sizes).propose(request_of("a", tokens), count)


def test_what_followed_before_is_proposed() -> None:
    drafts = propose([1, 2, 3, 9, 8, 7, 1, 2, 3], 2)
    assert drafts == [9, 8], f"1, 2, 3 were followed by 9, 8; the guess is {drafts}"


def test_at_most_count_tokens() -> None:
    drafts = propose([1, 2, 3, 9, 8, 7, 1, 2, 3], 5)
    assert drafts == [9, 8, 7, 1, 2], f"five tokens followed: {drafts}"


def test_the_text_may_end_before_count() -> None:
    drafts = propose([1, 2, 9, 1, 2], 9)
    assert drafts == [9, 1, 2], f"only three tokens are known to follow: {drafts}"


def test_longer_matches_come_first() -> None:
    drafts = propose([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 1)
    assert drafts == [7], f"5, 1, 2 is a longer match than the later 1, 2: {drafts}"


def test_of_equal_matches_the_latest_counts() -> None:
    drafts = propose([1, 2, 8, 1, 2, 9, 1, 2], 1)
    assert drafts == [9], f"1, 2 was followed by 8, and later by 9: {drafts}"


def test_the_newest_tokens_do_not_match_themselves() -> None:
    assert propose([1, 2, 3, 4], 4) == [], "nothing was there before"


def test_a_match_may_overlap_the_newest_tokens() -> None:
    drafts = propose([4, 4, 4], 3)
    assert drafts == [4], f"4, 4 occurred at 0, and was followed by one 4: {drafts}"


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 1]])
def test_a_short_text_has_no_match(tokens: list[int]) -> None:
    assert propose(tokens, 4) == [], "a match needs at least two tokens before the newest ones"
