"""The questions of invariance: random recordings, the shapes and orders of sums, random parts."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch.nn.functional import linear

from milestones.electives.invariance import sums
from milestones.electives.invariance.first_difference import (
    Recording,
    first_difference,
    hooked,
)
from milestones.electives.invariance.split_attention import combine, fixed_split
from tests.exercises.test_invariance_1 import Model

Asked = Iterator[tuple[str, str, Any]]


def recordings(chance: Random) -> Asked:
    names: list[str] = []
    model, length = Model(), chance.randint(1, 5)
    with hooked(model, lambda name, tensor: names.append(f"{name} {[*tensor.shape]}")):
        model(torch.tensor([[chance.randrange(16) for _ in range(length)]]))
    model(torch.tensor([[1]]))
    yield "what hooks note", f"{length} tokens", names
    a, b = Recording(), Recording()
    positions = chance.sample(range(9), 4)
    operations = [f"operation {letter}" for letter in chance.sample("abcdef", 4)]
    changed = {(chance.choice(positions), chance.choice(operations)) for _ in range(3)}
    step = chance.choice([2.0**-20, 0.5])  # the smaller one is close to nothing
    for recording in (a, b):
        order = positions if recording is a else sorted(positions)
        for position in order:
            for number, operation in enumerate(operations):
                if recording is b and (position, operation) == (positions[0], operations[-1]):
                    continue  # the other one has it
                rows = torch.full((1, 3, 2), 1.0 + number)
                if recording is b and (position, operation) in changed:
                    rows[0, 1] += step * (1 + operations.index(operation) + 4 * position)
                recording.note(operation, rows, {1: position})
                rows.zero_()
                recording.note(operation, rows, {2: position})  # computed again
        kept = {p: {o: row.tolist() for o, row in at.items()} for p, at in recording.rows.items()}
        yield "rows that are kept", f"positions {order}", [f"{p} {kept[p]}" for p in sorted(kept)]
    found = first_difference(a, b)
    about = f"positions {positions}, {operations}, changed {sorted(changed)} by {step}"
    yield "the first difference", about, None if found is None else [*found]


def products(chance: Random) -> Asked:
    size, count = chance.randint(3, 12), chance.randint(1, 30)
    x = torch.tensor([[float(chance.randint(-4, 4)) for _ in range(size)] for _ in range(count)])
    weight = torch.tensor([[float(chance.randint(-4, 4)) for _ in range(size)] for _ in range(5)])
    bias = torch.tensor([float(chance.randint(1, 9)) for _ in range(5)])
    num_parts = chance.randint(2, size)
    shapes: list[list[int]] = []

    def noted(part: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append([*part.shape])
        return linear(part, *args)

    setattr(sums, "linear", noted)  # noqa: B010
    try:
        whole = sums.fixed_product(x[None], weight, bias)
        parts = sums.split_product(x[None], weight, bias, num_parts=num_parts)
    finally:
        setattr(sums, "linear", linear)  # noqa: B010
    about = f"{count} rows of {size}, {num_parts} parts"
    yield "shapes of products", about, shapes
    yield "products", about, [[*whole.shape], whole.flatten().tolist()]
    yield "products in parts", about, [[*parts.shape], parts.flatten().tolist()]
    row = [1e8, *(float(chance.randint(1, 3)) for _ in range(3)), -1e8, float(chance.randint(1, 5))]
    found = sums.split_product(torch.tensor([row]), torch.ones(1, 6), num_parts=6)
    yield "the order of parts", f"{row}", found.tolist()
    row = [256.0, *(float(chance.randint(0, 1)) for _ in range(5))]
    found = sums.split_product(
        torch.tensor([row]), torch.ones(1, 6), torch.tensor([1.0]), num_parts=6,
        dtype=torch.bfloat16,
    )  # fmt: skip
    yield "parts in bfloat16", f"{row}, and a bias of 1", [f"{found.dtype}", found.tolist()]


def attention(chance: Random) -> Asked:
    context = chance.randint(1, 70)
    first, num_requests = chance.randrange(context), chance.randint(1, 9)
    about = f"a context of {context} from {first}, {num_requests} requests"
    yield "the fixed split", about, fixed_split(context, first, num_requests).tolist()
    num_parts = chance.randint(2, 5)
    top = torch.tensor([float(chance.choice([-2, 0, 1, 3])) for _ in range(num_parts)])
    totals = torch.tensor([chance.choice([0.5, 1.0, 2.0]) for _ in range(num_parts)])
    values = torch.tensor([[float(chance.randint(-9, 9))] for _ in range(num_parts)])
    for raised in (0.0, 500.0):
        found = combine(top + raised, totals, values)
        about = f"scores {top.tolist()} + {raised}, {totals.tolist()}, {values.tolist()}"
        yield "parts combined", about, [f"{value:.3f}" for value in found.tolist()]
    row = [1e8, *(float(chance.randint(1, 3)) for _ in range(3)), -1e8, float(chance.randint(1, 5))]
    found = combine(torch.zeros(6), torch.ones(6), torch.tensor(row)[:, None])
    yield "the order of parts", f"{row}", [f"{value:.4f}" for value in found.tolist()]


QUESTIONS = {
    "invariance.1": (recordings, 100), "invariance.2": (products, 60),
    "invariance.3": (attention, 100),
}  # fmt: skip
