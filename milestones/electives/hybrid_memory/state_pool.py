"""`StatePool`: the memory of recurrent states, with a slot for each row and for each snapshot.

A state has the same size after one token and after a million. A step replaces it by the next one:

    load    the state of a request that joins becomes a copy of a snapshot, or zeros
    step    each request of the flat batch continues its own state
    save    a state at the end of a block is copied to a snapshot

All of this runs on the forward stream. Therefore a slot may be given away as soon as the last step
that reads it has been launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from transformers import DynamicCache, PreTrainedModel

from .kv_groups import KVCacheGroupSpec
from .kv_pool import free_memory
from .recurrent import cache_over, recurrent_layers, state_parts, states_switched
from .state_slots import Loads, Saves

SNAPSHOTS_PER_ROW = 2  # a request leaves one at the end of its prompt, and one of its answer


@dataclass
class StateStep:
    """What a step does with states."""

    rows: Sequence[int]  # of its requests
    query_lens: Sequence[int]  # tokens of each of them
    loads: Loads = field(default_factory=list)
    saves: Saves = field(default_factory=list)


class StatePool:
    """The parts of all states, each [num_rows + num_snapshots, ...]: first the states of the rows.

    A part keeps the dtype that the model gives it: float32 for a recurrence, also in a model of low
    precision. A model without states has no part. Raises `RuntimeError` if there is no memory.
    """

    def __init__(self, model: PreTrainedModel, num_rows: int) -> None:
        self.layers = recurrent_layers(model)
        self.num_rows = num_rows
        self.num_snapshots = num_rows * SNAPSHOTS_PER_ROW
        size, states = num_rows + self.num_snapshots, state_parts(model)
        self.num_bytes = size * sum(x.numel() * x.element_size() for x in states.values())
        if states and self.num_bytes > free_memory(model.device):
            raise RuntimeError(
                f"free memory does not hold {size} recurrent states of {self.num_bytes // size} "
                "bytes each: lower max_num_seqs"
            )
        self.parts = {
            part: state.new_empty(size, *state.shape[1:]).zero_() for part, state in states.items()
        }
        self.caches: list[DynamicCache] = []  # of each row, over its slot
        for row in range(num_rows if self.parts else 0):
            own = {part: memory[row : row + 1] for part, memory in self.parts.items()}
            self.caches.append(cache_over(model, own))

    @property
    def groups(self) -> list[KVCacheGroupSpec]:
        """The group of the layers with states, if there are any."""
        numbers = tuple(dict.fromkeys(layer for layer, *_ in self.parts))
        return [KVCacheGroupSpec(numbers, num_snapshots=self.num_snapshots)] if numbers else []

    @contextmanager
    def step(self, step: StateStep) -> Iterator[None]:
        """Return a context in which a forward continues the states of a step."""
        for row, snapshot in step.loads if self.parts else ():
            for memory in self.parts.values():
                state = memory[self.num_rows + snapshot] if snapshot is not None else 0
                memory[row] = state
        caches = [self.caches[row] for row in step.rows] if self.parts else []
        with states_switched(self.layers, caches, step.query_lens):
            yield
        for row, snapshot in step.saves:
            for memory in self.parts.values():
                memory[self.num_rows + snapshot] = memory[row]

    def release(self) -> None:
        """Free the memory. No forward may follow."""
        self.parts, self.caches = {}, []
