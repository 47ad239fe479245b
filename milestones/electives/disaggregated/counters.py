"""The counters of several sides as those of one engine. Plain Python data."""

from __future__ import annotations

from dataclasses import fields, replace

from common import EngineStats
from common.outputs import StepCounters


def with_counters_of(mine: EngineStats, *others: EngineStats) -> EngineStats:
    """Return the stats of a side, with the counters of all sides together."""
    sides, names = [mine, *others], [counter.name for counter in fields(StepCounters)]
    return replace(mine, **{name: sum(getattr(side, name) for side in sides) for name in names})
