"""Write the figures of a run: as a table, as JSON, and as a block of a page."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table

from common.displays.dashboard import summary_table
from common.displays.demo import machine

from .tally import Results, Tally, added

MARKS = ("<!-- soak -->", "<!-- /soak -->")
COUNTED = (
    "schedules", "requests", "steps", "tokens", "retractions", "aborts", "refusals", "failures",
    "errors", "interrupts", "wrong", "stuck", "lost",
)  # fmt: skip
COLUMNS = (*COUNTED, "seconds", "MB at start", "MB at end")


def cells(tally: Tally) -> list[str]:
    """Return the figures of a row."""
    counted = [f"{getattr(tally, name):,}" for name in COUNTED]
    seconds, start, end = tally.seconds, tally.memory_start_mb, tally.memory_end_mb
    return [*counted, f"{seconds:,.0f}", f"{start:,.0f}", f"{end:,.0f}"]


def rows(results: Results) -> list[tuple[str, list[str]]]:
    """Return a row for each lane, and a sum for a milestone with several modes."""
    milestones = results.milestones()
    found = []
    for name, total in milestones.items():
        lanes = [lane for lane in results.lanes if lane.partition(" ")[0] == name]
        found += [(lane, cells(results.lanes[lane])) for lane in sorted(lanes)]
        if len(lanes) > 1:
            found.append((name, cells(total)))
    if len(milestones) > 1:
        total = Tally()
        total.memory_start_mb = min(t.memory_start_mb for t in milestones.values())
        for tally in milestones.values():
            total = added(total, tally)
        found.append(("all", cells(total)))
    return found


def table(results: Results, title: str) -> Table:
    """Return the figures as a table for a terminal."""
    made = summary_table(title, "engine", *COLUMNS)
    for name, values in rows(results):
        made.add_row(name, *values)
    return made


def document(results: Results, seed: int, jobs: int, minutes: float) -> dict[str, Any]:
    """Return all figures of a run, for JSON."""
    return {
        "machine": machine(),
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seed": seed,
        "jobs": jobs,
        "minutes": round(minutes, 2),
        "milestones": {name: asdict(tally) for name, tally in results.milestones().items()},
        "lanes": {name: asdict(tally) for name, tally in results.lanes.items()},
        "failed": [{**asdict(failed), "command": failed.command} for failed in results.failed],
        "leaks": results.leaks,
    }


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write the figures of `document`."""
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def write_page(path: Path, figures: dict[str, Any]) -> None:
    """Replace the block between the marks of a page. The text around it stays."""
    results = Results({name: Tally(**tally) for name, tally in figures["lanes"].items()})
    jobs = f"{figures['jobs']} process{'es' if figures['jobs'] > 1 else ''}"
    failed = figures["failed"] or figures["leaks"]
    lines = [
        f"Seed {figures['seed']}, {figures['minutes']:,.0f} minutes, {jobs}, {figures['machine']}, "
        f"{figures['date']}. {'Something is wrong.' if failed else 'Nothing is wrong.'}",
        "",
        f"| engine | {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * len(COLUMNS)}",
        *(f"| {name} | {' | '.join(values)} |" for name, values in rows(results)),
    ]
    start, end = MARKS
    before, rest = path.read_text(encoding="utf-8").split(start)
    after = rest.split(end)[1]
    path.write_text(f"{before}{start}\n{chr(10).join(lines)}\n{end}{after}", encoding="utf-8")
