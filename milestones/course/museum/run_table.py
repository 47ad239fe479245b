"""Show a recorded run in a terminal: the work of each step, its decisions, and its pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

Json = dict[str, Any]
WORDS = {
    "admit": "admit {name}, {count} tokens cached", "wait": "none joins: {reason}",
    "retract": "retract {name}", "evict": "evict {count}", "split": "split a node",
}  # fmt: skip


def run_table(run: Json) -> Table:
    """Return the steps of a run, as `scene.played` gives it."""
    trace = run["trace"]
    names = {request["number"]: request["request_id"] for request in trace["requests"]}
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    tables: dict[str, list[int]] = {}
    nodes: dict[str, list[int]] = {}
    for frame in trace["frames"]:
        changes = frame.get("requests", {})
        for number, change in changes.items():
            if "pages" in change:
                tables[names[int(number)]] = change["pages"] or []
        for number, node in frame.get("nodes", {}).items():
            if node is None:
                del nodes[number]
            elif "pages" in node:
                nodes[number] = node["pages"]
        step = frame["step"]
        if not 1 <= step <= len(run["free"]) + bool(run["ended"]):
            continue
        free = run["free"][step - 1] if step <= len(run["free"]) else None
        table.add_row(str(step), step_lines(frame, names, tables, nodes, free))
    return table


def step_lines(
    frame: Json, names: dict[int, str], tables: dict[str, list[int]], nodes: dict[str, list[int]],
    free: list[int] | None,
) -> Text:  # fmt: skip
    """Return the lines of one step: its work, its decisions, the pages after it, and new text."""
    work = [
        f"{names[int(number)]} {count}"
        for batch in frame.get("batches", []) for number, count in batch.items()
    ]  # fmt: skip
    first = f"computes {', '.join(work)}" if work else "computes nothing"
    decided = [
        WORDS[one["kind"]].format(
            name=names.get(one["request"]), count=one["count"], reason=one["reason"]
        )
        for one in frame.get("decisions", []) if one["kind"] in WORDS
    ]  # fmt: skip
    text = Text("; ".join([first, *decided]))
    if frame.get("error"):
        text.append(f"; raises {frame['error']}", "red")
    rows = [f"{name}: {ranges(pages)}" for name, pages in tables.items() if pages]
    if cached := sorted(page for pages in nodes.values() for page in pages):
        rows.append(f"tree: {ranges(cached)}")
    if free is not None:
        rows.append(f"free: {ranges(free) or '-'}")
    text.append(f"\n{' | '.join(rows)}", "dim")
    said = [
        f"{names[int(number)]} +{change['text']!r}"
        for number, change in frame.get("requests", {}).items() if change.get("text")
    ]  # fmt: skip
    if said:
        text.append(f"\n{'  '.join(said)}", "italic")
    return text


def ranges(pages: Iterable[int]) -> str:
    """Return page numbers in their order, with runs as ranges: 1-4 9 7."""
    parts = []
    for _, run in groupby(enumerate(pages), key=lambda pair: pair[1] - pair[0]):
        numbers = [page for _, page in run]
        parts.append(
            f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 2 else " ".join(map(str, numbers))
        )
    return " ".join(parts)
