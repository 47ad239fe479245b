"""The panels of the demo: which request holds each row, and how much of the row is used."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common import Request
from common.displays.palette import request_style
from common.displays.shapes import bar, sparkline

from .. import LLMEngine

MARKED = 15  # refreshes for which a moved request is marked


class Panels:
    """Called for each refresh of the screen."""

    def __init__(self, engine: LLMEngine, console: Console) -> None:
        self.engine = engine
        self.console = console
        self.history: list[float] = []  # rows taken, at each refresh
        self.rows: dict[str, int] = {}  # of the requests, at the last refresh
        self.moved: dict[str, tuple[int, int]] = {}  # from which row, and at which refresh

    def __call__(self) -> Iterable[RenderableType]:
        """Return the rows of the slot cache, and how many of them were taken over time."""
        kv_cache = self.engine.core.scheduler.kv_cache
        width = max(10, self.console.width - 58)
        self._find_moves()
        rows = Table(box=None, pad_edge=False, show_header=False)
        for row in range(kv_cache.num_rows):
            owner = kv_cache.rows[row] if row < len(kv_cache.rows) else None
            used = owner.num_computed_tokens if owner else 0
            share = used / kv_cache.row_tokens
            style = "dim" if owner is None else request_style(owner.request_id)
            rows.add_row(
                Text(f"row {row}", style),
                Text(owner.request_id if owner else "free", style),
                bar([(share, "█", style), (1 - share, "░" if owner else "·", style)], width),
                Text(f"{used:4d} of {kv_cache.row_tokens}", "dim" if owner is None else ""),
                Text(self._move_of(owner), "bold"),
            )
        yield Panel(rows, title="the slot cache: █ used ░ reserved · free", title_align="left")
        self.history.append(len(kv_cache.rows))
        yield Text("rows taken over time  ") + sparkline(self.history, width, kv_cache.num_rows)

    def _find_moves(self) -> None:
        """Note the requests that have another row than at the last refresh."""
        rows = {r.request_id: n for n, r in enumerate(self.engine.core.scheduler.kv_cache.rows)}
        for name, row in rows.items():
            before = self.rows.get(name, row)
            if before != row:
                self.moved[name] = (before, len(self.history))
        self.rows = rows

    def _move_of(self, owner: Request | None) -> str:
        """Return which row a request came from, for some refreshes after it was moved."""
        before, when = self.moved.get(owner.request_id if owner else "", (0, -MARKED))
        return f"moved, was {before}" if len(self.history) - when < MARKED else ""
