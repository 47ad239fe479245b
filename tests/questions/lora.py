"""The questions of lora: random uses of slots, and products of random batches."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from milestones.electives.lora.lora_layers import add_grouped, add_masked
from tests.exercises.test_lora_1 import NAMES, loaded, make_slots, resident, run
from tests.exercises.test_lora_2 import grouped, make_rows, make_weights

Asked = Iterator[tuple[str, str, Any]]


def slots(chance: Random) -> Asked:
    """Let requests join if there is room for their adapters, go on, and end in any order."""
    num_slots = chance.randint(1, 3)
    kept, adapters = make_slots(num_slots)
    about = f"{num_slots} slots"
    for _ in range(25):
        adapter = adapters.get(chance.choice(f"{NAMES}-"))
        name = adapter.name if adapter else "base"
        if kept.running and chance.random() < 0.4:
            ended = kept.running.pop(chance.randrange(len(kept.running)))
            about += f", {ended.adapter} ends"
        if chance.random() < 0.3:
            about += ", a step is launched"
            loads = [tuple(load) for load in map(shown, kept.take_loads())]
            yield "the slots, and what is written", shortened(about), loads
        usable = kept.can_use(adapter)
        about += f", {name} arrives"
        if usable:
            run(kept, adapter, tokens_left=chance.choice([0, 1, 5]))
        used = kept.use(adapter) if usable else None
        yield "can an adapter be used", shortened(about), usable
        written = [used, resident(kept), loaded(kept), kept.num_loads]
        yield "the slots, and what is written", shortened(about), written


def shortened(about: str) -> str:
    """Return the end of a long story: an exam must not say too much."""
    return about if len(about) < 400 else f"... {about[-400:]}"


def shown(load: Any) -> tuple[int, str]:
    return load.slot, load.adapter.name


def products(chance: Random) -> Asked:
    """Ask for the groups of random batches, and for their outputs, rounded."""
    for _ in range(4):
        count, num_slots = chance.randint(1, 9), chance.randint(3, 5)
        of_rows = [chance.randrange(num_slots) for _ in range(count)]
        weights = make_weights(num_slots, seed=chance.randrange(1000))
        found = []
        groups = grouped(of_rows)
        for kind in ("grouped", "masked"):
            x, y = make_rows(count)
            if kind == "grouped":
                parts = [(slot, torch.tensor(rows)) for slot, rows in groups.items()]
                add_grouped(x, y, weights, parts)
            else:
                add_masked(x, y, weights, torch.tensor(of_rows))
            found.append([[f"{value + 0.0:.2f}" for value in row] for row in y.tolist()])
        about = f"slots {of_rows}"
        yield "groups of rows", about, sorted(groups.items())
        yield "products of groups", about, found[0]
        yield "products with a mask", about, found[1]


QUESTIONS = {"lora.1": (slots, 40), "lora.2": (products, 30)}
