"""`AdapterSlots`: which adapters have their matrices on the device. Plain Python data, no tensors.

    slot       0     1     2     3        max_loras = 3; slot 0 is the model without an adapter
    adapter    -     C     A     -
    rows       base  C  A  A  base        the slot of each request of a step

An adapter is written to a slot when a request with it is scheduled. If no slot is free, the least
recently used adapter that is not in use leaves its slot. The step in flight may still read that
slot. So the scheduler only notes a `Load`. The device makes this copy at the beginning of the next
step, after the step in flight.
"""

from __future__ import annotations

from common import Request

from .adapters import BASE, Adapter, Load
from .in_flight import continuing


class AdapterSlots:
    """I5: the running requests use at most `num_slots` adapters."""

    def __init__(self, num_slots: int, running: list[Request]) -> None:
        """`running`: the scheduler's own list."""
        self.num_slots = num_slots
        self.running = running
        self.free_slots = list(range(num_slots, BASE, -1))
        self.resident: dict[Adapter, int] = {}  # slots by adapter, least recently used first
        self.loads: list[Load] = []  # for the next step
        self.num_loads = 0

    def in_use(self) -> set[Adapter]:
        """Return the adapters that must keep their slots: those of requests that go on.

        A request that finishes with the step in flight does not need its slot in the next step.
        """
        return {r.adapter for r in continuing(self.running) if r.adapter is not None}

    def can_use(self, adapter: Adapter | None) -> bool:
        """Return whether a request with this adapter may join the running ones."""
        if adapter is None:
            return True
        in_use = self.in_use()
        return adapter in in_use or len(in_use) < self.num_slots

    def use(self, adapter: Adapter | None) -> int:
        """Return the slot of an adapter. The adapter becomes the most recently used one.

        If it has no slot, it takes one, and the next step begins with a `Load`.
        """
        if adapter is None:
            return BASE
        slot = self.resident.pop(adapter, None)
        if slot is None:
            slot = self.take_slot()
            self.loads = [load for load in self.loads if load.slot != slot]
            self.loads.append(Load(slot, adapter))
            self.num_loads += 1
        self.resident[adapter] = slot
        return slot

    def take_slot(self) -> int:
        """Return a free slot, or that of the least recently used adapter that is not in use."""
        if self.free_slots:
            return self.free_slots.pop()
        in_use = self.in_use()
        idle = next((adapter for adapter in self.resident if adapter not in in_use), None)
        assert idle is not None, f"I5: {in_use} are in use, and there are {self.num_slots} slots"
        return self.resident.pop(idle)

    def take_loads(self) -> list[Load]:
        """Return the loads that the next step must begin with."""
        loads, self.loads = self.loads, []
        return loads

    def undo(self, loads: list[Load]) -> None:
        """Queue again the loads of a step that was undone, if their slots are not taken."""
        self.loads += [load for load in loads if self.resident.get(load.adapter) == load.slot]

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a slot has no owner or two, or if too many are in use."""
        slots = sorted([*self.resident.values(), *self.free_slots])
        assert slots == list(range(BASE + 1, self.num_slots + 1)), (
            f"I3: slots {self.resident} and free slots {self.free_slots} are not {self.num_slots}"
        )
        in_use = self.in_use()
        assert len(in_use) <= self.num_slots, f"I5: {in_use} are in use in {self.num_slots} slots"
