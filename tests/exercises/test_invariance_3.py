"""invariance.3: attention over parts of the context at fixed positions."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from milestones.electives.invariance.split_attention import LENGTH, combine, fixed_split


@pytest.mark.parametrize("context", [1, LENGTH - 1, LENGTH, LENGTH + 1, 5 * LENGTH + 3])
def test_all_parts_have_one_length(context: int) -> None:
    found = fixed_split(context, context - 1, 1)
    num_parts = -(-context // LENGTH)
    assert found.shape == (num_parts, LENGTH), "the last part is padded to LENGTH"
    assert found.flatten().tolist() == [*range(num_parts * LENGTH)], (
        "positions in order from 0; those behind the context are padding"
    )


def test_a_position_lies_at_one_place() -> None:
    """I2: however long the context is, wherever the chunk begins, whatever else decodes."""
    longest = fixed_split(6 * LENGTH, 0, 1)
    for context in range(1, 6 * LENGTH):
        for first, num_requests in ((0, 1), (context - 1, 1), (context // 2, 1), (context - 1, 9)):
            found = fixed_split(context, first, num_requests)
            assert torch.equal(found, longest[: len(found)]), f"I2: a context of {context}"


def parts_of(
    scores: list[list[float]], values: list[list[float]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `combine` gets: for each part, its scores and the values at its positions."""
    tops, totals, sums = [], [], []
    for part, numbers in zip(scores, values, strict=True):
        top = max(part)
        weights = (torch.tensor(part) - top).exp()
        tops.append(top)
        totals.append(float(weights.sum()))
        sums.append((weights[:, None] * torch.tensor(numbers)[:, None]).sum(dim=0))
    return torch.tensor(tops), torch.tensor(totals), torch.stack(sums)


def attention(scores: list[list[float]], values: list[list[float]]) -> torch.Tensor:
    """Return the attention over all positions at once, in float64."""
    flat = torch.tensor([*chain(*scores)], dtype=torch.float64)
    weights = flat.softmax(dim=0)
    return (weights * torch.tensor([*chain(*values)], dtype=torch.float64)).sum()[None]


CASES = [
    ([[0.5, 1.0]], [[3.0, 5.0]]),
    ([[0.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]]),
    ([[2.0, -1.0, 0.0], [3.0]], [[1.0, 2.0, 3.0], [4.0]]),
    ([[1.0], [7.0, 7.5], [-4.0]], [[1.0], [-2.0, 8.0], [3.0]]),
]


@pytest.mark.parametrize(("scores", "values"), CASES)
def test_parts_combine_to_the_whole(scores: list[list[float]], values: list[list[float]]) -> None:
    found = combine(*parts_of(scores, values))
    assert found.shape == (1,)
    assert float(found) == pytest.approx(float(attention(scores, values)), rel=1e-6), (
        "a part counts by its total, and by its largest score"
    )


def test_large_scores_do_not_overflow() -> None:
    """exp(1000) is infinite: subtract the largest score of all parts first."""
    found = combine(*parts_of([[1000.0], [998.0]], [[1.0], [2.0]]))
    assert float(found) == pytest.approx(float(attention([[1000.0], [998.0]], [[1.0], [2.0]])))


def test_padding_at_the_end_changes_no_bit() -> None:
    """A part that no query sees has the lowest score, and a total that must not count."""
    chance = torch.Generator().manual_seed(0)
    top = torch.randn(7, 3, generator=chance)  # seven queries, three parts
    totals, sums = torch.rand(7, 3, generator=chance), torch.randn(7, 3, 4, generator=chance)
    lowest = torch.full((7, 5), torch.finfo(torch.float32).min)
    padded = combine(
        torch.cat([top, lowest], dim=1),
        torch.cat([totals, torch.zeros(7, 5)], dim=1),
        torch.cat([sums, torch.zeros(7, 5, 4)], dim=1),
    )
    assert torch.equal(padded, combine(top, totals, sums)), (
        "I2: a longer context of another request adds parts of padding, and they change nothing"
    )


def test_parts_are_added_from_the_first_to_the_last() -> None:
    """In float32, 1e8 + 1 is 1e8."""
    sums = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    found = combine(torch.zeros(4), torch.ones(4), sums)
    assert found.tolist() == [0.25], "(((1e8 + 1) - 1e8) + 1) / 4: the parts in this order"


def test_a_query_does_not_see_the_other_queries() -> None:
    chance = torch.Generator().manual_seed(1)
    top, totals = torch.randn(2, 5, 3, generator=chance), torch.rand(2, 5, 3, generator=chance)
    sums = torch.randn(2, 5, 3, 4, generator=chance)
    whole = combine(top, totals, sums)
    assert whole.shape == (2, 5, 4)
    for query in range(5):
        alone = combine(top[:, query], totals[:, query], sums[:, query])
        assert torch.equal(alone, whole[:, query])
