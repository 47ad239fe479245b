"""embedding.1: sums of hidden states, added up over chunks, become a vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milestones.electives.embedding import pooling
from tests.exercises.pooling_requests import pooling_request

STATES = torch.arange(24, dtype=torch.float32).view(
    8, 3
)  # of eight tokens: row i is 3i, 3i+1, 3i+2


def vector(kind: Any, rows: list[tuple[list[float], int]], length: int, **params: Any) -> Any:
    """Give a request rows, each with the start of its chunk. Return its vector as a list."""
    request = pooling_request("a", [1] * length, kind, **params)
    for row, start in rows:
        pooling.accumulate(request, torch.tensor(row), start)
    return [round(value, 4) for value in pooling.embedding(request).tolist()]


def test_each_request_has_the_sum_of_its_own_tokens() -> None:
    found = pooling.pool(STATES, [slice(0, 2), slice(3, 4), slice(4, 8)]).tolist()
    assert found == [[3, 5, 7], [9, 10, 11], [66, 70, 74]], "I2: one row for each slice, in order"


def test_sums_are_made_in_float32() -> None:
    """A sum of 300 in float16 has steps of a quarter, and one of 70,000 does not exist."""
    states = torch.full((1000, 2), 100.25, dtype=torch.float16)
    found = pooling.pool(states, [slice(0, 1000)])
    assert (found.dtype, found.tolist()) == (torch.float32, [[100250.0, 100250.0]])


def test_the_last_token_alone() -> None:
    found = vector("LAST", [([3.0, 4.0], 8)], 9)
    assert found == [3.0, 4.0], "no chunk before the last one gives anything"


def test_a_mean_adds_its_chunks_up() -> None:
    found = vector("MEAN", [([3.0, 4.0], 0), ([5.0, 6.0], 4), ([1.0, 2.0], 8)], 9)
    assert found == [1.0, round(12 / 9, 4)], "the sum of all chunks, by the tokens of the prompt"


def test_a_retracted_request_begins_again() -> None:
    """Its first chunk is computed a second time."""
    found = vector("MEAN", [([3.0, 4.0], 0), ([5.0, 6.0], 4), ([3.0, 4.0], 0), ([5.0, 6.0], 4)], 8)
    assert found == [1.0, 1.25], "the sum starts again from zero"


def test_a_row_that_was_given_is_not_changed() -> None:
    """The row may be shared, so the sum is a new tensor."""
    request = pooling_request("a", [1] * 8, "MEAN")
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    pooling.accumulate(request, first, 0)
    pooling.accumulate(request, second, 4)
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [3.0, 4.0])


def test_a_vector_has_unit_length() -> None:
    found = vector("LAST", [([3.0, 4.0], 0)], 1, normalize=True)
    assert found == [0.6, 0.8]


def test_a_vector_is_cut_and_then_normalized() -> None:
    found = vector("LAST", [([3.0, 4.0, 12.0], 0)], 1, normalize=True, dimensions=2)
    assert found == [0.6, 0.8], "unit length after the cut"
    found = vector("LAST", [([3.0, 4.0, 12.0], 0)], 1, dimensions=2)
    assert found == [3.0, 4.0]


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_zeros_stay_zeros(kind: Any) -> None:
    found = vector(kind, [([0.0, 0.0], 0)], 1, normalize=True)
    assert found == [0.0, 0.0], "no division of zero by zero"
