"""Record the table of `measure disaggregated` for the slides of electives."""

from __future__ import annotations

from milestones.course.student.measure_disaggregated import by_chunk

from .record_ideas import TINY
from .record_measured import Json, Runs

NAMES = ("chunks_64", "chunks_256", "chunks_1024", "two_sides")


def latencies(_name: str) -> Json:
    """Return a row for two equal engines with chunks of each size, and one for two sides."""
    rows = []
    measured = by_chunk("disaggregated", TINY, (64, 256, 1024))
    for name, (_, _, gap, first, first_p95, *sent) in zip(NAMES, measured, strict=True):
        rows.append({
            "machines": name, "itl_p99": float(gap), "ttft_p50": int(first),
            "ttft_p95": int(first_p95), "sent": [cell for cell in sent if cell],
        })  # fmt: skip
    return {"rows": rows}


# Another run is equal.
SIDES: Runs = {"disaggregated_latencies": (("disaggregated",), latencies)}
