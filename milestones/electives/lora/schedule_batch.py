"""`ScheduleBatch`: the work of one step, with the slots of its adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

from common import Request

from .adapters import BASE, Load
from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch


@dataclass
class ScheduleBatch(M5ScheduleBatch):
    """The requests of a step belong to different adapters."""

    slots: list[int] = field(default_factory=list)  # of the adapter of each request
    loads: list[Load] = field(default_factory=list)  # adapters that the step begins with

    def add(self, request: Request, num_tokens: int, slot: int = BASE) -> None:
        super().add(request, num_tokens)
        self.slots.append(slot)
