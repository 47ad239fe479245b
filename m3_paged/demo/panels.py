"""The panels of the demo: which request holds each page, and how full the memory is."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from .. import LLMEngine
from ..kv_cache import PADDING_PAGE

OWNER_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "white")


class Panels:
    """Called for each refresh of the screen."""

    def __init__(self, engine: LLMEngine, console: Console) -> None:
        self.engine = engine
        self.console = console

    @property
    def num_lines(self) -> int:
        """Return the number of screen lines that the panels take."""
        num_pages = self.engine.core.scheduler.kv_cache.allocator.num_pages
        return num_pages // max(1, self.console.width - 4) + 5

    def __call__(self) -> Iterable[RenderableType]:
        """Return the map of pages, and what the scheduler expects and takes back."""
        kv_cache = self.engine.core.scheduler.kv_cache
        cells = [("·", "dim")] * (kv_cache.allocator.num_pages + 1)
        cells[PADDING_PAGE] = ("#", "dim")
        for request in self.engine.core.scheduler.running:
            number = int(request.request_id[1:])
            cell = (chr(ord("A") + number % 26), OWNER_STYLES[number % len(OWNER_STYLES)])
            for page in kv_cache.pages_of(request):
                cells[page] = cell
        page_size = self.engine.config.page_size
        title = f"pages of {page_size} tokens: A is r0, B is r1 … · free # padding"
        yield Panel(Text.assemble(*cells), title=title, title_align="left")
        stats = self.engine.stats()
        ratio = self.engine.core.scheduler.admission.new_token_ratio
        yield Text(
            f"{stats.kv_pages_free} of {stats.kv_pages_total} pages free · "
            f"{stats.kv_tokens_used} tokens in {stats.kv_tokens_reserved} slots held · "
            f"{stats.num_retractions} retractions · expecting {ratio:.0%} of the tokens that may "
            "still come"
        )
