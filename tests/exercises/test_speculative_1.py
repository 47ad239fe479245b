"""speculative.1: prompt lookup guesses what followed the newest tokens before."""

from __future__ import annotations

import pytest

from milestones.electives.speculative.drafter import NGramDrafter
from tests.exercises.by_hand import make_request


def propose(tokens: list[int], count: int, sizes: tuple[int, ...] = (3, 2)) -> list[int]:
    return NGramDrafter(sizes).propose(make_request("a", tokens), count)


# Why: the tokens, the most drafts, and the drafts.
CASES: dict[str, tuple[list[int], int, list[int]]] = {
    "1 2 3 was followed by 9 8": ([1, 2, 3, 9, 8, 7, 1, 2, 3], 2, [9, 8]),
    "five tokens followed 1 2 3": ([1, 2, 3, 9, 8, 7, 1, 2, 3], 5, [9, 8, 7, 1, 2]),
    "only three tokens are known to follow": ([1, 2, 9, 1, 2], 9, [9, 1, 2]),
    "4 4 occurred at 0, and was followed by one 4": ([4, 4, 4], 3, [4]),
    "the newest tokens do not match themselves": ([1, 2, 3, 4], 4, []),
    "a match needs at least two tokens before the newest ones": ([1, 1], 4, []),
    "two tokens": ([1, 2], 4, []),
    "one token": ([1], 4, []),
}


@pytest.mark.parametrize("why", CASES)
def test_what_followed_before_is_proposed(why: str) -> None:
    tokens, count, expected = CASES[why]
    assert propose(tokens, count) == expected, why


def test_longer_matches_come_first() -> None:
    drafts = propose([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 1)
    assert drafts == [7], "5, 1, 2 is a longer match than the later 1, 2"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([1, 2, 8, 5, 1, 2, 9, 1, 2], [9, 1]), ([1, 2, 8, 5, 6, 7, 9, 1, 2], [])],
)
def test_only_the_window_is_searched(tokens: list[int], expected: list[int]) -> None:
    """Otherwise the work of a step would grow with the text."""
    drafts = NGramDrafter((2,), window=6).propose(make_request("a", tokens), 2)
    assert drafts == expected, f"the window has the last 6 tokens, {tokens[-6:]}"


def test_of_equal_matches_the_latest_counts() -> None:
    assert propose([1, 2, 8, 1, 2, 9, 1, 2], 1) == [9], "1, 2 was followed by 8, and later by 9"
