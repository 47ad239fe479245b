"""invariance.1: hooks record a request's numbers, and two recordings differ first somewhere."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from milestones.electives.invariance.first_difference import (
    Difference,
    Recording,
    first_difference,
    hooked,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.down(self.up(x).relu())
        return added


class Model(nn.Module):
    """A model of two modules with parts, and five without."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layer = Layer()
        self.head = nn.Linear(4, 16, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(self.embed(ids)))
        return logits


ORDER = ["embed (input)", "embed", "layer.up (input)", "layer.up", "layer.down (input)",
         "layer.down", "head (input)", "head"]  # fmt: skip


def recorded(*rows: dict[str, list[float]]) -> Recording:
    """Return a recording: for each position, from the name of an operation to its row."""
    found = Recording()
    for position, row in enumerate(rows):
        for operation, values in row.items():
            found.note(operation, torch.tensor([[values]]), {0: position})
    return found


def test_hooks_note_each_module_without_parts_in_order() -> None:
    noted: list[tuple[str, tuple[int, ...]]] = []
    model = Model()
    with hooked(model, lambda name, tensor: noted.append((name, tuple(tensor.shape)))):
        model(torch.tensor([[1, 2, 3]]))
    assert [name for name, _ in noted] == ORDER, (
        "the input of a module, and then its output, in the order of computation; a module that "
        "has parts is not noted"
    )
    assert noted[0][1] == (1, 3) and noted[3][1] == (1, 3, 8)


def test_an_input_shows_what_lies_between_two_modules() -> None:
    """The addition to the residual stream is no module."""
    noted: dict[str, torch.Tensor] = {}
    model = Model()
    with hooked(model, noted.__setitem__):
        model(torch.tensor([[1, 2, 3]]))
    added = noted["embed"] + noted["layer.down"]
    assert torch.equal(noted["head (input)"], added)


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_stays(fails: bool) -> None:
    noted: list[str] = []
    model = Model()
    with suppress(ZeroDivisionError), hooked(model, lambda name, tensor: noted.append(name)):
        if fails:
            raise ZeroDivisionError("the run fails")
    model(torch.tensor([[1]]))
    assert noted == [], "after the context, also after an error, the model has no hook"


def test_a_recording_keeps_the_rows_of_its_request() -> None:
    found = Recording()
    rows = torch.arange(8.0).view(1, 4, 2)  # of four tokens; rows 1 and 3 are the request's
    found.note("up", rows, {1: 5, 3: 6})
    assert {p: row["up"].tolist() for p, row in found.rows.items()} == {5: [2, 3], 6: [6, 7]}


def test_a_row_that_is_kept_does_not_change() -> None:
    found, rows = Recording(), torch.ones(1, 1, 2)
    found.note("up", rows, {0: 0})
    rows.zero_()
    assert found.rows[0]["up"].tolist() == [1, 1], "the memory of a tensor is used again: copy it"


def test_a_position_that_is_computed_again_keeps_its_first_rows() -> None:
    found = Recording()
    for value in (1.0, 2.0):
        found.note("up", torch.full((1, 1, 2), value), {0: 3})
    assert found.rows[3]["up"].tolist() == [1, 1]


def test_equal_recordings_have_no_difference() -> None:
    a, b = (recorded({"up": [1.0, 2.0]}, {"up": [3.0, 4.0]}) for _ in range(2))
    assert first_difference(a, b) is None


def test_the_earliest_position_comes_first_then_the_earliest_operation() -> None:
    """What differs most lies behind it, and what was noted first may be a later position."""
    a = recorded({"norm": [1.0], "up": [1.0]}, {"norm": [1.0], "up": [1.0], "head": [1.0]})
    b = recorded({"norm": [1.0], "up": [1.5]}, {"norm": [1.25], "up": [9.0], "head": [9.0]})
    assert first_difference(a, b) == Difference(0, "up", 0.5)
    c = recorded({"norm": [1.0], "up": [1.0]}, {"norm": [1.25], "up": [9.0], "head": [9.0]})
    assert first_difference(a, c) == Difference(1, "norm", 0.25)
    late = Recording({1: c.rows[1], 0: b.rows[0]})
    assert first_difference(late, a) == Difference(0, "up", 0.5), "positions in their own order"


def test_one_bit_is_a_difference() -> None:
    value = torch.tensor(1.0)
    above = float(torch.nextafter(value, torch.tensor(2.0)))
    found = first_difference(recorded({"up": [1.0]}), recorded({"up": [above]}))
    assert found is not None, "the same bits, and not close: a tolerance hides the beginning"
    assert found.largest == pytest.approx(2**-23)


def test_only_what_both_have_is_compared() -> None:
    """A chunk in the middle of a prompt has no logits."""
    a = recorded({"up": [1.0], "head": [1.0]}, {"up": [1.0]}, {"up": [2.0]})
    b = recorded({"up": [1.0]}, {"up": [1.0], "head": [7.0]})
    assert first_difference(a, b) is None
