"""The film strip of a run: a line for each request, and a column for each step."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from ..tracing.data import TraceData
from ..tracing.marks import marks_of_batches

# What happens to a request in a step: the mark, its style, and its meaning. If a column has several
# steps, the first of these is shown.
MARKS = {
    "retract": ("R", "bold lost", "retracted"),
    "stall": ("-", "lost", "not computed"),
    "prefill": ("#", "prompt", "prompt"),
    "decode": ("█", "output", "token"),
    "waiting": ("·", "dim", "waits"),
    "absent": (" ", "", ""),
}


def film_strip(data: TraceData, console: Console, title: str = "the run") -> RenderableType:
    """Return the strip. A column has several steps if the run does not fit the screen."""
    rows = {request.number: list[str]() for request in data.requests}
    for marks in marks_of_batches(data):
        for number, row in rows.items():
            row.append(marks.get(number, "absent"))
    num_steps = max(map(len, rows.values()), default=0)
    names = [request.request_id for request in data.requests]
    indent = max(map(len, names), default=0) + 1
    width = max(20, console.width - indent - 4)
    per_column = max(1, -(-num_steps // width))
    lines = [
        Text(f"{name:{indent}}").append_text(_marks(row, per_column))
        for name, row in zip(names, rows.values(), strict=True)
    ]
    column = "a step" if per_column == 1 else f"{per_column} steps"
    seen = {mark for row in rows.values() for mark in row} - {"absent"}
    meanings = [f"{MARKS[mark][0]} {MARKS[mark][2]}" for mark in MARKS if mark in seen]
    legend = Text(f"a line is a request, a column is {column}: {', '.join(meanings)}")
    return Panel(Group(*lines, legend), title=f"{title}: {num_steps} steps", title_align="left")


def _marks(row: list[str], per_column: int) -> Text:
    text = Text()
    for first in range(0, len(row), per_column):
        mark = min(row[first : first + per_column], key=list(MARKS).index)
        text.append(*MARKS[mark][:2])
    return text
