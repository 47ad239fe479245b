"""lora.2: the rows of a step get the products of their own adapters."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from milestones.electives.lora.lora_layers import (
    SlotWeights,
    add_grouped,
    add_masked,
    group_rows,
)

MIXED = [0, 2, 1, 1, 0, 2, 3]  # the slot of each row


def make_weights(
    num_slots: int = 4, rank: int = 3, width: int = 6, out: int = 5, seed: int = 0
) -> SlotWeights:
    """Return random matrices. Slot 0 has zeros, and slot 2 an adapter of rank 1."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(num_slots, rank, width, generator=generator)
    b = torch.randn(num_slots, rank, out, generator=generator)
    ranks = torch.tensor([0] + [rank] * (num_slots - 1))
    for slot, used in ((0, 0), (2, 1)):
        ranks[slot], a[slot, used:], b[slot, used:] = used, 0, 0
    return SlotWeights(a, b, ranks)


def make_rows(count: int, width: int = 6, out: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs x, [count, in], and the outputs y of the model, [count, out]."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, width, generator=generator)
    return x, torch.randn(count, out, generator=generator)


def expected(
    x: torch.Tensor, y: torch.Tensor, weights: SlotWeights, slots: list[int]
) -> torch.Tensor:
    """Return y + x A^T B, one row after the other."""
    rows = [y[i] + (x[i] @ weights.a[s].T) @ weights.b[s] for i, s in enumerate(slots)]
    return torch.stack(rows)


def grouped(slots: list[int]) -> dict[int, list[int]]:
    return {slot: rows.tolist() for slot, rows in group_rows(slots)}


def test_rows_are_grouped_by_slot() -> None:
    assert grouped(MIXED) == {1: [2, 3], 2: [1, 5], 3: [6]}, "rows of an adapter may be apart"
    found = [slot for slot, _rows in group_rows(MIXED)]
    assert sorted(found) == [1, 2, 3], "one group for each slot: each group takes two products"


def test_base_rows_are_in_no_group() -> None:
    assert grouped([0, 0]) == {}, "there is nothing to add to them"


def test_a_group_is_an_index() -> None:
    [(slot, rows)] = group_rows([0, 3])
    assert (slot, rows.dtype) == (3, torch.int64), "indices of rows are int64"


def test_each_group_gets_its_own_product() -> None:
    (x, y), weights = make_rows(7), make_weights()
    right = expected(x, y, weights, MIXED)
    add_grouped(x, y, weights, [(slot, torch.tensor(r)) for slot, r in
                                ((2, [1, 5]), (1, [2, 3]), (3, [6]))])  # fmt: skip
    wrong = (~torch.isclose(y, right, atol=1e-5).all(dim=1)).nonzero().flatten().tolist()
    assert wrong == [], "these rows have wrong outputs"


def test_the_small_products_come_first() -> None:
    """x A^T has only `rank` columns. A^T B would be as large as the weight of the model."""
    (x, y), weights = make_rows(4, 64, 48), make_weights(rank=2, width=64, out=48)
    with FlopCounterMode(display=False) as counter:
        add_grouped(x, y, weights, [(1, torch.tensor([0, 2]))])
    most = 2 * (2 * 64 * 2 + 2 * 2 * 48)
    assert counter.get_total_flops() <= most, (
        f"the products of two rows and rank 2, 64 columns in and 48 out, took "
        f"{counter.get_total_flops()} operations: x A^T and then B need {most}, for these rows only"
    )


def test_base_rows_keep_their_bits() -> None:
    (x, y), weights = make_rows(7), make_weights()
    before = y.clone()
    add_grouped(x, y, weights, [(1, torch.tensor([2, 3]))])
    assert torch.equal(y[[0, 1, 4, 5, 6]], before[[0, 1, 4, 5, 6]]), "I2: they are not written"


def test_masked_rows_get_the_same_products() -> None:
    (x, y), weights = make_rows(7), make_weights()
    right = expected(x, y, weights, MIXED)
    add_masked(x, y, weights, torch.tensor(MIXED))
    wrong = (~torch.isclose(y, right, atol=1e-5).all(dim=1)).nonzero().flatten().tolist()
    assert wrong == [], "these rows have wrong outputs"


def test_masked_products_need_no_value_on_the_host() -> None:
    """A CUDA graph has fixed shapes. Tensors on torch's meta device have shapes and no values."""
    (x, y), weights = make_rows(7), make_weights()
    there = SlotWeights(weights.a.to("meta"), weights.b.to("meta"), weights.ranks)
    try:
        add_masked(x.to("meta"), y.to("meta"), there, torch.tensor(MIXED, device="meta"))
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(
            "add_masked needs the slots on the host (a mask as an index, nonzero, .tolist(), an "
            f"if): no CUDA graph could replay it. The error of torch: {error}"
        ) from error


def test_the_output_may_be_a_part_of_longer_rows() -> None:
    """q, k and v are one product: y is a view of some of its columns."""
    (x, y), weights = make_rows(7), make_weights()
    whole = torch.zeros(7, 11)
    whole[:, 3:8] = y
    right = expected(x, y, weights, MIXED)
    add_masked(x, whole[:, 3:8], weights, torch.tensor(MIXED))
    assert torch.allclose(whole[:, 3:8], right, atol=1e-5), "the view is written in place"
    assert not whole[:, [0, 1, 2, 8, 9, 10]].any(), "the other columns belong to other layers"
