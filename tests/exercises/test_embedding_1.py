"""embedding.1: sums of hidden states, added up over chunks, become a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from common import PoolingParams
from milestones.electives.embedding import pooling
from milestones.electives.embedding.pooling_request import PoolingRequest

STATES = torch.arange(24.0).view(8, 3)  # of eight tokens: row i is 3i, 3i+1, 3i+2


def pooling_request(name: str, tokens: Sequence[int], kind: Any, **params: Any) -> PoolingRequest:
    """Return a request for a vector, which is not normalized unless `params` say so."""
    text: Any = None  # only the shell around a core reads it
    return PoolingRequest(
        name, None, list(tokens), PoolingParams(kind, **{"normalize": False, **params}),
        text=text, arrival_time=0.0,
    )  # fmt: skip


def vector(kind: Any, rows: list[tuple[list[float], int]], length: int, **params: Any) -> Any:
    """Give a request rows, each with the start of its chunk. Return its vector as a list."""
    request = pooling_request("a", [1] * length, kind, **params)
    for row, start in rows:
        pooling.accumulate(request, torch.tensor(row), start)
    return [round(value, 4) for value in pooling.embedding(request).tolist()]


def test_each_request_has_the_sum_of_its_own_tokens() -> None:
    found = pooling.pool(STATES, [slice(0, 2), slice(3, 4), slice(4, 8)]).tolist()
    assert found == [[3, 5, 7], [9, 10, 11], [66, 70, 74]], "I2: one row for each slice, in order"


def test_a_sum_does_not_depend_on_the_other_requests() -> None:
    """Beside a state of 100 million, float32 does not see a difference of 2."""
    states = torch.tensor([[1e8], [1.0], [1.0]])
    found = pooling.pool(states, [slice(0, 1), slice(1, 3)]).tolist()
    assert found == [[1e8], [2.0]], (
        "I2: the second request has the states 1 and 1: its sum must be made of these alone, and "
        "not be the difference of two sums over the step"
    )


def test_sums_are_made_in_float32() -> None:
    """A sum of 300 in float16 has steps of a quarter, and one of 70,000 does not exist."""
    states = torch.full((1000, 2), 100.25, dtype=torch.float16)
    found = pooling.pool(states, [slice(0, 1000)])
    assert (found.dtype, found.tolist()) == (torch.float32, [[100250.0, 100250.0]]), (
        "the sum of 1000 states of 100.25 is 100250, in float32"
    )


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


@pytest.mark.parametrize(
    ("row", "params", "expected"),
    [
        ([3.0, 4.0], {}, [3.0, 4.0]),
        ([3.0, 4.0], {"normalize": True}, [0.6, 0.8]),
        ([3.0, 4.0, 12.0], {"dimensions": 2}, [3.0, 4.0]),
        ([3.0, 4.0, 12.0], {"normalize": True, "dimensions": 2}, [0.6, 0.8]),
    ],
    ids=["as it is", "unit length", "cut", "unit length after the cut"],
)
def test_a_vector_is_cut_and_then_normalized(
    row: list[float], params: dict[str, Any], expected: list[float]
) -> None:
    """The vector of the last token: no chunk before the last one gives anything."""
    assert vector("LAST", [(row, 8)], 9, **params) == expected, (
        f"LAST, with the state {row} and {params or 'no other parameters'}"
    )


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_zeros_stay_zeros(kind: Any) -> None:
    found = vector(kind, [([0.0, 0.0], 0)], 1, normalize=True)
    assert found == [0.0, 0.0], "no division of zero by zero"
