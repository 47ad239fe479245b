"""invariance.2: products in an order of sums that does not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from milestones.electives.invariance import sums

WEIGHT = torch.arange(24.0).view(3, 8) % 5 - 2  # [N, K] of small whole numbers
BIAS = torch.tensor([1.0, 2.0, 4.0])


def rows_of(count: int) -> torch.Tensor:
    return torch.arange(count * 8.0).view(count, 8) % 7 - 3


@pytest.mark.parametrize("count", [1, 7, 8, 9, 20])
def test_each_product_has_the_same_number_of_rows(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch chooses its kernel by the shapes of a product, so they must never vary."""
    shapes: list[int] = []

    def noted(x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape[0])
        return linear(x, *args)

    monkeypatch.setattr(sums, "linear", noted)
    sums.fixed_product(rows_of(count), WEIGHT)
    expected = [sums.TILE] * -(-count // sums.TILE)
    assert shapes == expected, "I2: the rows of each product must be TILE, and no more products"


@pytest.mark.parametrize("count", [1, 8, 11])
def test_a_fixed_product_is_the_product(count: int) -> None:
    x = rows_of(count)
    for bias in (None, BIAS):
        assert torch.equal(sums.fixed_product(x, WEIGHT, bias), linear(x, WEIGHT, bias))


def test_the_shape_of_the_batch_is_kept() -> None:
    assert sums.fixed_product(rows_of(6).view(2, 3, 8), WEIGHT).shape == (2, 3, 3)
    assert sums.fixed_product(rows_of(1)[None], WEIGHT, BIAS).shape == (1, 1, 3)


def test_a_row_has_the_same_bits_beside_others() -> None:
    x = torch.randn(19, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    whole = sums.fixed_product(x, weight)
    for row in range(19):
        alone = sums.fixed_product(x[row : row + 1], weight)
        assert torch.equal(alone[0], whole[row]), f"I2: row {row} differs alone"


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_parts_give_the_product(num_parts: int) -> None:
    x = rows_of(5)
    for bias in (None, BIAS):
        found = sums.split_product(x, WEIGHT, bias, num_parts=num_parts)
        assert torch.equal(found, linear(x, WEIGHT, bias)), "whole numbers: exact in any order"


def test_each_part_is_a_fixed_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of K = 8, three parts are 3, 3 and 2 inputs."""
    shapes: list[tuple[int, int]] = []
    own = sums.fixed_product

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.append((x.shape[-1], weight.shape[-1]))
        return own(x, weight)

    monkeypatch.setattr(sums, "fixed_product", noted)
    sums.split_product(rows_of(2), WEIGHT, BIAS, num_parts=3)
    assert shapes == [(3, 3), (3, 3), (2, 2)]


def test_parts_are_added_from_the_first_to_the_last() -> None:
    """In float32, 1e8 + 1 is 1e8."""
    x, ones = torch.tensor([[1e8, 1.0, -1e8, 1.0]]), torch.ones(1, 4)
    found = sums.split_product(x, ones, num_parts=4)
    assert found.tolist() == [[1.0]], "((1e8 + 1) - 1e8) + 1 is 1: the parts in this order"


def test_partial_sums_are_added_in_their_dtype() -> None:
    """bfloat16 has 8 bits: 256 + 1 is 256."""
    x, ones = torch.tensor([[256.0, 1.0, 1.0]]), torch.ones(1, 3)
    assert sums.split_product(x, ones, num_parts=3).tolist() == [[258.0]]
    found = sums.split_product(x, ones, num_parts=3, dtype=torch.bfloat16)
    assert found.tolist() == [[256.0]], "each addition of parts is rounded to bfloat16"
    assert found.dtype == torch.float32


def test_a_bias_is_added_once_and_last() -> None:
    x, ones = torch.tensor([[256.0, 0.0]]), torch.ones(1, 2)
    bias = torch.tensor([1.0])
    found = sums.split_product(x, ones, bias, num_parts=2, dtype=torch.bfloat16)
    assert found.tolist() == [[257.0]], "after the sum is float32 again"
