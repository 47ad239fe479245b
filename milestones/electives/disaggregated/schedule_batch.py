"""`ScheduleBatch`: the work of one step, and the pages that it sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch


@dataclass(frozen=True)
class PageSend:
    """Pages of one attempt that a step completes. Page `sources[i]` is written to `targets[i]`."""

    attempt: int
    first: int  # the place of the first page in the request's row
    sources: list[int]  # pages of the prefill side
    targets: list[int]  # pages of the decode side


@dataclass
class ScheduleBatch(M5ScheduleBatch):
    """A step of the prefill side sends pages, layer by layer."""

    sends: list[PageSend] = field(default_factory=list)
