"""`LoRALayers`: the matrices of the slots, and their products with the rows of a step.

The output y of a linear layer for the row x grows by x A^T B, with A [rank, in] and B [rank, out]
of the row's slot; the scale of the adapter is a part of B. The product with the weight of the model
stays one product for all rows. Rows without an adapter keep their bits, because nothing is added.

    x      | base | sql | chat | chat | base |     y = product of all rows with the weight
    slot   | 0    | 1   | 2    | 2    | 0    |     y[1:2] += x[1:2] A1^T B1, and the same for slot 2

In float32 on a CPU, a compiled kernel adds row by row. A row gets the same bits there with any
other rows (I2). `add_grouped` and `add_masked` are its reference, and run everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common import EngineConfig
from common.fast import kernels

from .adapters import BASE, Load, LowRanks
from .additions import Additions, sites_of
from .peft_folder import LowRank

Groups = list[tuple[int, torch.Tensor]]  # slots with an adapter, and the indices [n] of their rows


@dataclass
class LoRARows:
    """The slots of the T rows of a forward."""

    slots: torch.Tensor  # [T] int64
    kept: torch.Tensor  # [N] indices in T: the last layer may compute only these rows
    groups: Groups | None  # None: the shapes must not depend on the adapters (`add_masked`)

    def of(self, num_rows: int) -> LoRARows:
        """Return the slots of all rows, or those of the kept rows if a layer has only these."""
        if num_rows == len(self.slots):
            return self
        assert num_rows == len(self.kept), f"I1: a layer has {num_rows} rows of {len(self.slots)}"
        slots = self.slots[self.kept]
        groups = None if self.groups is None else group_rows(slots.tolist())
        return LoRARows(slots, self.kept, groups)


@dataclass
class SlotWeights:
    """The matrices of all slots for one linear layer. Rows past the rank of an adapter are zero."""

    a: torch.Tensor  # [S, rank, in]
    b: torch.Tensor  # [S, rank, out]
    ranks: torch.Tensor  # [S] int64, on the host


def group_rows(slots: Sequence[int]) -> Groups:
    """Return the slots with an adapter, each with the indices [n] of its rows."""
    found: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot != BASE:
            found.setdefault(slot, []).append(row)
    return [(slot, torch.tensor(rows)) for slot, rows in found.items()]


def add_grouped(
    x: torch.Tensor,
    y: torch.Tensor,
    weights: SlotWeights,
    groups: Groups,  # as `group_rows` returns them
) -> None:
    """Add the products of each adapter with its own rows to y. x: [T, in]; y: [T, out]."""
    for slot, rows in groups:
        y.index_add_(0, rows, x[rows] @ weights.a[slot].T @ weights.b[slot])


def add_masked(
    x: torch.Tensor, y: torch.Tensor, weights: SlotWeights, slots: torch.Tensor
) -> None:  # fmt: skip
    """Add the same products with shapes that depend on T only, so that a CUDA graph can do it.

    Each row is multiplied with all A. Zeros replace what other slots give. Slot 0 has zeros.
    """
    low = (x @ weights.a.flatten(0, 1).T).unflatten(1, (len(weights.a), -1))  # [T, S, rank]
    others = torch.arange(len(weights.a), device=x.device) != slots[:, None]  # [T, S]
    y.addmm_(low.masked_fill(others[:, :, None], 0).flatten(1), weights.b.flatten(0, 1))


class LoRALayers:
    """The slots of a model on its device. The forward stream reads and writes them."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        sites = sites_of(model)
        self.shapes = {
            name: (site.linear.in_features, size)
            for site in sites
            for name, size in zip(site.names, site.sizes, strict=True)
        }
        slots, rank = config.max_loras + 1, config.max_lora_rank
        self.weights = {
            name: SlotWeights(
                torch.zeros(slots, rank, width, dtype=model.dtype, device=model.device),
                torch.zeros(slots, rank, out, dtype=model.dtype, device=model.device),
                torch.zeros(slots, dtype=torch.int64),
            )
            for name, (width, out) in self.shapes.items()
        }
        self.dtype, self.on_gpu = model.dtype, model.device.type == "cuda"
        on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
        self.kernels = kernels() if on_cpu and not config.readable else None
        self.additions = Additions(model, sites, self.add)
        self.rows: LoRARows | None = None  # of the forward that runs

    def stage(self, weights: LowRanks) -> LowRanks:
        """Return the matrices of an adapter in the dtype of the model, in one piece of host memory.

        For a GPU the memory is pinned. Then `write` only starts copies, and the host does not wait.
        Raises `ValueError` for numbers that are too large for this dtype.
        """
        size = sum(matrix.numel() for low_rank in weights.values() for matrix in low_rank)
        memory = torch.empty(size, dtype=self.dtype, pin_memory=self.on_gpu)

        def staged(matrix: torch.Tensor) -> torch.Tensor:
            nonlocal memory
            part, memory = memory[: matrix.numel()], memory[matrix.numel() :]
            return part.view(matrix.shape).copy_(matrix)

        whole = memory
        found = {name: LowRank(*map(staged, low_rank)) for name, low_rank in weights.items()}
        if not bool(whole.isfinite().all()):  # `add_masked` would give them to all rows
            raise ValueError(
                f"the adapter has numbers that are too large for {self.dtype}: use another dtype"
            )
        return found

    def write(self, load: Load) -> None:
        """Copy an adapter to its slot. This is work of the forward stream."""
        for name, weights in self.weights.items():
            low_rank = load.adapter.weights.get(name)
            weights.a[load.slot].zero_()
            weights.b[load.slot].zero_()
            weights.ranks[load.slot] = 0 if low_rank is None else low_rank.rank
            if low_rank is not None:
                weights.a[load.slot, : low_rank.rank].copy_(low_rank.a, non_blocking=True)
                weights.b[load.slot, : low_rank.rank].copy_(low_rank.b, non_blocking=True)

    @contextmanager
    def applied(self, rows: LoRARows | None) -> Iterator[None]:
        """Return a context in which forwards of the model add the products. None: without them."""
        if rows is None:
            yield
            return
        with self.additions.active():
            self.rows = rows
            yield
            self.rows = None

    def add(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the products of a linear layer to its output. x: [T, in]; y: [T, out]."""
        assert self.rows is not None, "only a forward inside `applied` adds"
        weights, rows = self.weights[name], self.rows.of(len(x))
        if self.kernels is not None:
            self.kernels.add_low_rank(x, y, rows.slots, weights.ranks, weights.a, weights.b)
        elif rows.groups is None:
            add_masked(x, y, weights, rows.slots)
        else:
            add_grouped(x, y, weights, rows.groups)
