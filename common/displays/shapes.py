"""Bars, sparklines and tables, in characters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from rich.table import Table
from rich.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"


def bar(parts: Iterable[tuple[float, str, str]], width: int) -> Text:
    """Return a bar of `(share, character, style)` parts. A share of 1 is `width` characters."""
    text = Text()
    for share, character, style in parts:
        text.append(character * round(share * width), style)
    return text


def sparkline(values: list[float], width: int, top: float) -> Text:
    """Return values over time as blocks from 0 to `top`, the newest on the right."""
    if len(values) > width:  # Average neighbours, so that the whole run stays visible.
        edges = [len(values) * i // width for i in range(width + 1)]
        groups = [values[a:b] for a, b in pairwise(edges)]
        values = [sum(group) / len(group) for group in groups]
    return Text("".join(BLOCKS[min(8, round(8 * value / top))] for value in values), "output")


def summary_table(title: str, *columns: str) -> Table:
    """Return an empty table of results: one column of names, then columns of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for i, column in enumerate(columns):
        options: dict[str, Any] = {"justify": "right"} if i else {}
        table.add_column(column, **options)
    return table
