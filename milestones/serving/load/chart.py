"""The picture of a run: latencies and goodput against the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...drawing.chart import lines

Json = dict[str, Any]


def chart(document: Json) -> str:
    """Draw p95 latencies and goodput as SVG: one curve for each server.

    document: of a run, as the file of `--json` has it.
    """
    figures: dict[str, Callable[[Json], float | None]] = {
        "TTFT p95, ms": lambda row: row["first_ms"] and row["first_ms"]["95"],
        "ITL p95, ms": lambda row: row["gap_ms"] and row["gap_ms"]["95"],
        "goodput, requests/s": lambda row: row["goodput"],
    }
    runs = document.get("engines") or {"server": document["rows"]}
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, figure in figures.items():
        for server, rows in runs.items():
            points = [(row["rate"], value) for row in rows if (value := figure(row)) is not None]
            if points:
                panels.setdefault(name, {})[server] = points
    return lines(panels, f"{document['model']}, {document['machine']}")
