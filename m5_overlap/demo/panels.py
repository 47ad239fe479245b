"""The panels of the demo: the tokens of each request, the radix tree, the owners of the pages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from common import Request
from common.displays.palette import letter, request_style
from common.displays.shapes import bar
from common.tracing.decisions import Decision, watch

from .. import LLMEngine
from ..kv_cache import PADDING_PAGE
from ..radix_cache import TreeNode

BAR_TOKENS = 280  # prompt and output that fill a request's bar; more, if a request has more


class Panels:
    """Called for each refresh of the screen."""

    def __init__(self, engine: LLMEngine, console: Console) -> None:
        self.engine = engine
        self.console = console
        self.tree_lines = max(4, console.height // 5)
        self.num_evicted = 0
        watch(engine.core, self._count_evictions, ExitStack())

    def __call__(self) -> Iterable[RenderableType]:
        """Return the tree, what each request found in it, and the owner of each page."""
        yield Panel(self._tree(), title="tree: pages · locks · hits, text", title_align="left")
        table = Table(box=None, pad_edge=False, show_header=False)
        running = self.engine.core.scheduler.running
        full = max([BAR_TOKENS, *(r.num_prompt_tokens + r.num_output_tokens for r in running)])
        for request in running:
            cached = request.num_cached_tokens or 0
            computed = min(request.num_computed_tokens, request.num_prompt_tokens) - cached
            parts = (cached, "=", "cached"), (computed, "#", "prompt"), (
                request.num_output_tokens, "+", "output",
            )  # fmt: skip
            shares = [(count / full, mark, style) for count, mark, style in parts]
            mark, style = self._owner(request)
            name = Text(f"{mark} {request.request_id}", style)
            table.add_row(name, bar(shares, self.console.width - 12))
        title = "tokens: = cached # computed + generated"
        yield Panel(table, title=title, title_align="left")
        yield self._pages()
        stats = self.engine.stats()
        reused, computed = stats.cached_prompt_tokens, stats.prefill_tokens
        yield Text(
            f"{reused} prompt tokens reused, {computed} computed: hit rate "
            f"{reused / max(1, reused + computed):.0%} · pages evicted: {self.num_evicted}"
        )

    def _tree(self) -> Tree:
        """Return the most recently used nodes, as many as there are lines, at their places."""
        nodes = list(self.engine.core.scheduler.kv_cache.radix_cache.nodes())
        latest = sorted(nodes, key=lambda node: (-node.last_used, node.num_prefix_pages))
        shown = set(latest[: self.tree_lines - 1])
        left_out = len(nodes) - len(shown)
        root = Tree(Text(f"{len(nodes)} nodes" + (f", {left_out} not shown" * bool(left_out))))
        branches = {self.engine.core.scheduler.kv_cache.radix_cache.root: root}
        # Parents come first. A parent is used whenever its child is, so it is shown too.
        for node in nodes:
            if node in shown and node.parent in branches:
                branches[node] = branches[node.parent].add(self._label(node))
        return root

    def _label(self, node: TreeNode) -> Text:
        text = " ".join(str(self.engine.loaded.tokenizer.decode(node.tokens)).split())
        style = "bold cached" if node.lock_count else "dim"
        facts = f"{len(node.pages)} · {node.lock_count} · {node.hits}  "
        label = Text(facts, style, no_wrap=True, overflow="ellipsis")
        return label.append(text, "default")

    def _pages(self) -> Panel:
        """Return the map of pages, with the owner of each."""
        kv_cache = self.engine.core.scheduler.kv_cache
        cells = [("·", "dim")] * (kv_cache.allocator.num_pages + 1)
        cells[PADDING_PAGE] = ("#", "dim")
        owners = {request.row: request for request in self.engine.core.scheduler.running}
        for row, pages in enumerate(kv_cache.table.rows):
            for page in pages:
                cells[page] = self._owner(owners.get(row))
        for node in kv_cache.radix_cache.nodes():
            for page in node.pages:
                cells[page] = ("=", "bold cached") if node.lock_count else ("-", "cached")
        title = "pages: A B … requests, = tree in use, - cached, · free, # padding"
        return Panel(Text.assemble(*cells), title=title, title_align="left")

    def _owner(self, request: Request | None) -> tuple[str, str]:
        """Return the letter of a request, and its style. None: it has ended."""
        if request is None:
            return "x", "dim"
        return letter(request.request_id), request_style(request.request_id)

    def _count_evictions(self, decision: Decision) -> None:
        if decision.kind == "evict":
            self.num_evicted += decision.count
