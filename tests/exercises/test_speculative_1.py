"""speculative.1: prompt lookup guesses what followed the newest tokens before."""

from __future__ import annotations

import pytest

from milestones.electives.speculative.drafter import NGramDrafter
from tests.exercises.by_hand import make_request


def propose(tokens: list[int], count: int, sizes: tuple[int, ...] = (3, 2)) -> list[int]:
    return NGramDrafter(sizes).propose(make_request("a", tokens), count)


def test_what_followed_before_is_proposed() -> None:
    assert propose([1, 2, 3, 9, 8, 7, 1, 2, 3], 2) == [9, 8], "1, 2, 3 were followed by 9, 8"


def test_at_most_count_tokens() -> None:
    assert propose([1, 2, 3, 9, 8, 7, 1, 2, 3], 5) == [9, 8, 7, 1, 2], "five tokens followed"


def test_the_text_may_end_before_count() -> None:
    assert propose([1, 2, 9, 1, 2], 9) == [9, 1, 2], "only three tokens are known to follow"


def test_longer_matches_come_first() -> None:
    drafts = propose([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 1)
    assert drafts == [7], "5, 1, 2 is a longer match than the later 1, 2"


def test_of_equal_matches_the_latest_counts() -> None:
    assert propose([1, 2, 8, 1, 2, 9, 1, 2], 1) == [9], "1, 2 was followed by 8, and later by 9"


def test_the_newest_tokens_do_not_match_themselves() -> None:
    assert propose([1, 2, 3, 4], 4) == [], "nothing was there before"


def test_a_match_may_overlap_the_newest_tokens() -> None:
    assert propose([4, 4, 4], 3) == [4], "4, 4 occurred at 0, and was followed by one 4"


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 1]])
def test_a_short_text_has_no_match(tokens: list[int]) -> None:
    assert propose(tokens, 4) == [], "a match needs at least two tokens before the newest ones"
