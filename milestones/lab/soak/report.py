"""Write the figures of a run: as a table, as a document, and as a block of a page."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table

from common.displays.dashboard import summary_table
from common.displays.demo import machine

from .parts import KINDS, PARTS
from .tally import Results, Tally, added

MARKS = ("<!-- soak -->", "<!-- /soak -->")
FAULT_MARKS = ("<!-- faults -->", "<!-- /faults -->")
OUTCOMES = ("again", "ends", "dead", "wrong")
COUNTED = (
    "schedules", "requests", "extras", "steps", "tokens", "retractions", "aborts", "refusals",
    "failures", "errors", "interrupts", "wrong", "stuck", "lost",
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


def grid(results: Results) -> tuple[tuple[str, ...], list[tuple[str, list[str]]]]:
    """Return the columns and the rows of a run: its figures, or its matrix of failures.

    A cell of the matrix says what a single failure did, then what a lasting one did. "never": no
    schedule reached the part.
    """
    cells = results.cells
    if not cells:
        return COLUMNS, rows(results)
    names = [name.split() for name in cells]
    parts = [part for part in PARTS if part in {part for _engine, part, _kind in names}]

    def words(engine: str, part: str) -> str:
        found = [cells.get(f"{engine} {part} {kind}") for kind in KINDS]
        return ", ".join(
            " or ".join(word for word in OUTCOMES if outcomes[word]) or "never"
            for outcomes in found
            if outcomes is not None
        )

    engines = dict.fromkeys(engine for engine, _part, _kind in names)
    return tuple(parts), [(e, [words(e, part) or "-" for part in parts]) for e in engines]


def table(results: Results, title: str) -> Table:
    """Return the figures as a table for a terminal."""
    columns, lines = grid(results)
    made = summary_table(title, "engine", *columns)
    for name, values in lines:
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
        "faults": results.cells,
    }


def write_page(path: Path, results: Results, figures: dict[str, Any]) -> None:
    """Replace the block between the marks of a page. The text around it stays."""
    columns, body = grid(results)
    jobs = f"{figures['jobs']} process{'es' if figures['jobs'] > 1 else ''}"
    failed = figures["failed"] or figures["leaks"]
    schedules = sum(tally.schedules for tally in results.lanes.values())
    lines = [
        f"Seed {figures['seed']}, {schedules:,} schedules, {figures['minutes']:,.0f} minutes, "
        f"{jobs}, {figures['machine']}, {figures['date']}. "
        f"{'Something is wrong.' if failed else 'Nothing is wrong.'}",
        "",
        f"| engine | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
        *(f"| {name} | {' | '.join(values)} |" for name, values in body),
    ]
    start, end = FAULT_MARKS if results.cells else MARKS
    before, rest = path.read_text(encoding="utf-8").split(start)
    after = rest.split(end)[1]
    path.write_text(f"{before}{start}\n{chr(10).join(lines)}\n{end}{after}", encoding="utf-8")
