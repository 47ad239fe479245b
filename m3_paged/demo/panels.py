"""The panels of the demo: the page table of each request, the pool, and how full it is."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.displays.palette import letter, request_style

from .. import LLMEngine
from ..kv_cache import PADDING_PAGE

FEW_PAGES = 128  # are drawn in short lines, with spaces between them


class Panels:
    """Called for each refresh of the screen."""

    def __init__(self, engine: LLMEngine, console: Console) -> None:
        self.engine = engine
        self.console = console

    def __call__(self) -> Iterable[RenderableType]:
        """Return the tables beside the pool, and what the scheduler expects and takes back."""
        both = Table.grid(expand=True)
        both.add_column(ratio=1)
        both.add_column()
        both.add_row(self._tables(), self._pool())
        yield both
        stats = self.engine.stats()
        ratio = self.engine.core.scheduler.admission.new_token_ratio
        yield Text(
            f"pages free: {stats.kv_pages_free} of {stats.kv_pages_total} · slots used: "
            f"{stats.kv_tokens_used} of {stats.kv_tokens_reserved} · "
            f"retractions: {stats.num_retractions} · new_token_ratio: {ratio:.0%}",
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip

    def _tables(self) -> Panel:
        """Return the page table of each running request."""
        tables = Table.grid(padding=(0, 1))
        tables.add_column(no_wrap=True, min_width=5)
        tables.add_column(no_wrap=True, overflow="ellipsis")
        for request in self.engine.core.scheduler.running:
            pages = self.engine.core.scheduler.kv_cache.pages_of(request)
            style = request_style(request.request_id)
            name = Text(f"{letter(request.request_id)} {request.request_id}", f"bold {style}")
            tables.add_row(name, Text(" ".join(map(str, pages)), style))
        return Panel(tables, title="page tables", title_align="left")

    def _pool(self) -> Panel:
        """Return the map of pages: a letter for each page that a request holds."""
        kv_cache = self.engine.core.scheduler.kv_cache
        cells = [("·", "dim")] * (kv_cache.allocator.num_pages + 1)
        cells[PADDING_PAGE] = ("#", "dim")
        for request in self.engine.core.scheduler.running:
            name = request.request_id
            for page in kv_cache.pages_of(request):
                cells[page] = (letter(name), f"bold {request_style(name)}")
        length, gap = (16, " ") if len(cells) <= FEW_PAGES else (32, "")
        lines = [
            Text(gap).join(Text(mark, style) for mark, style in cells[first : first + length])
            for first in range(0, len(cells), length)
        ]
        for number, line in enumerate(lines):
            lines[number] = Text.assemble((f"{number * length:3d} ", "dim"), line)
        size = self.engine.config.page_size
        title = f"pages of {size} tokens, · free # padding"
        return Panel(Text("\n").join(lines), title=title, title_align="left")
