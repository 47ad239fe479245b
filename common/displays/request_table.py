"""The table of requests in a demo: what each of them is about, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

STATE_STYLES = {
    "waiting": "dim",
    "running": "bold output",
    "done": "cached",
    "abort": "lost",
    "error": "bold lost",
}


@dataclass
class Entry:
    """The facts that the screen shows of one request."""

    label: str
    state: str = "waiting"
    row: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""


def request_table(entries: list[tuple[str, Entry]], width: int) -> Table:
    """Return the table for a terminal of that width. Each entry has the name of its request."""
    table = Table(box=None, expand=True, pad_edge=False, show_edge=False)
    table.add_column("id", width=4, no_wrap=True)
    table.add_column("request", ratio=2, no_wrap=True, overflow="ellipsis")
    table.add_column("state", width=7)
    table.add_column("row", width=3, justify="right")
    table.add_column("prompt", width=6, justify="right")
    table.add_column("output", width=6, justify="right")
    table.add_column("text", ratio=5, no_wrap=True)
    text_width = max(10, (width - 45) * 5 // 7 - 2)
    for request_id, entry in entries:
        table.add_row(
            request_id,
            entry.label,
            Text(entry.state, STATE_STYLES[entry.state]),
            "" if entry.row is None else str(entry.row),
            str(entry.num_prompt_tokens or ""),
            str(entry.num_output_tokens or ""),
            Text(" ".join(entry.text.split())[-text_width:], "default"),
        )
    return table
