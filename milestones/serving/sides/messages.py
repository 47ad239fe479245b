"""What a decode side and a prefill process say to each other, besides the elective's messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common import EngineConfig, EngineStats

from ...electives.disaggregated.counters import with_counters_of


@dataclass(frozen=True)
class Start:
    """The first message to a prefill process.

    pages: how its pages reach the decode side: `SharedMemory` or `Rendezvous`.
    """

    config: EngineConfig
    pages: Any
    sys_path: list[str]
    num_threads: int  # of torch


@dataclass(frozen=True)
class Ready:
    """The prefill process has its model. If pages are sent, it waits for the process group."""


@dataclass(frozen=True)
class StartFailed:
    """The last message of a prefill process that cannot start."""

    error: str


@dataclass(frozen=True)
class ForwardFailed:
    """The forward of these attempts failed. The decode side must abort them.

    is_blameless: no request can be the cause, for example because an invariant is broken.
    """

    attempts: tuple[int, ...]
    error: str
    is_blameless: bool


@dataclass(frozen=True)
class Reset:
    """The prefill process must empty its prefix cache."""


@dataclass(frozen=True)
class Check:
    """The prefill process must check its invariants, and answer with `Checked`."""


@dataclass(frozen=True)
class Checked:
    """error: the invariant that is broken; empty if none is."""

    error: str


@dataclass(frozen=True)
class Transfer:
    """What has been sent so far.

    num_bytes: of pages. seconds: in which pages were written. hidden_seconds: the part of them in
    which a forward ran at the same time.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    hidden_seconds: float = 0.0

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
            self.hidden_seconds + other.hidden_seconds,
        )


@dataclass(frozen=True)
class Report:
    """The state of a prefill process after a step."""

    stats: EngineStats = field(default_factory=EngineStats)
    transfer: Transfer = Transfer()

    def after(self, earlier: Report) -> Report:
        """Return this report with what processes before this one have counted."""
        stats = with_counters_of(self.stats, earlier.stats)
        return Report(stats, earlier.transfer + self.transfer)


@dataclass(frozen=True)
class Posted:
    """A message of a prefill process. It must be read after so many writes of pages have ended."""

    message: Any
    num_writes: int
