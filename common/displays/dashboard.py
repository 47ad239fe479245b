"""A screen that shows the requests of a running engine.

On a terminal the screen is live; anywhere else it is plain lines. All demos share it, and each adds
the panels of its own lesson. Every state is shown as a word too, never by a colour alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from ..llm_engine import LLMEngine
from ..outputs import PoolingRequestOutput, RequestOutput
from ..tracing.decisions import Decision, watch
from .pace import HELP, Pace

STATE_STYLES = {
    "waiting": "yellow",
    "running": "bold cyan",
    "done": "green",
    "abort": "red",
    "error": "bold red",
    "free": "dim",
}
REFRESH_SECONDS = 0.1
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Entry:
    """The facts that the screen shows of one request."""

    label: str
    state: str = "waiting"
    row: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""


class Dashboard:
    """Shows an engine between `__enter__` and `__exit__`. Add each request to both, then `step()`.

    On a terminal, a step is shown for a quarter of a second, and keys pause the run: see `Pace`.

    panels: called for each refresh; returns what the lesson shows below the requests.
    plain: plain lines instead of a live screen. None: plain if the console is not a terminal.
    panel_lines: the number of screen lines that the panels take.
    """

    def __init__(
        self,
        engine: LLMEngine,
        title: str,
        console: Console,
        panels: Callable[[], Iterable[RenderableType]] = tuple,
        plain: bool | None = None,
        panel_lines: int = 10,
    ) -> None:
        self.engine = engine
        self.title = title
        self.console = console
        self.panels = panels
        self.panel_lines = panel_lines
        self.plain = not console.is_terminal if plain is None else plain
        self.entries: dict[str, Entry] = {}
        self.output_tokens = 0
        self._started, self._refreshed = engine.now(), time.perf_counter()
        self._live: Live | None = None
        self.pace = Pace() if not self.plain and console.file.isatty() else None
        self._waits = ""  # why no more requests join, since the last step
        self._watching = ExitStack()

    def __enter__(self) -> Self:
        watch(self.engine.core, self._note, self._watching)
        self._started = self.engine.now()
        if not self.plain:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        if self.pace is not None:
            self._watching.enter_context(self.pace)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watching.close()
        if self._live is not None:
            if kind is None:  # The panels are empty by now. The answers stay.
                answers = self._requests([*self.entries.items()])
                self._live.update(Panel(answers, title=self.title, title_align="left"))
            self._live.stop()  # It shows all of them, even if the terminal is too low.

    @property
    def elapsed(self) -> float:
        """Return the seconds since the dashboard was opened, without the waits for a person."""
        waited = 0.0 if self.pace is None or self.engine.clock.is_virtual else self.pace.waited
        return self.engine.now() - self._started - waited

    def add(self, request_id: str, label: str) -> None:
        """Show a request with a short label."""
        self.entries[request_id] = Entry(label)
        self._line(f"{request_id} arrives: {label}")

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine, show what changed, and return the outputs."""
        self._waits = ""
        outputs = self.engine.step()
        for output in outputs:
            self._update(self.entries[output.request_id], output)
        self._find_rows()
        now = time.perf_counter()
        idle = not self.engine.has_unfinished_requests()
        is_paced = self.pace is not None and not self.pace.is_skipping
        is_due = is_paced or idle or now - self._refreshed > REFRESH_SECONDS
        if self._live is not None and is_due:
            self._refreshed = now
            self._live.update(self.render(), refresh=True)
        if self.pace is not None:
            self.pace.wait()
        return outputs

    def render(self) -> RenderableType:
        """Return the whole screen."""
        keys = HELP if self.pace is not None and self.pace.read_key is not None else None
        requests = Panel(
            self._requests(self._visible()),
            title=self.title, title_align="left", subtitle=keys, subtitle_align="left",
        )  # fmt: skip
        return Group(requests, *self.panels())

    def _update(self, entry: Entry, output: RequestOutput) -> None:
        entry.num_prompt_tokens = len(output.prompt_token_ids)
        if isinstance(output, PoolingRequestOutput):
            self._update_pooled(entry, output)
            return
        completion = output.outputs[0]
        first = entry.num_output_tokens == 0 and bool(completion.token_ids)
        self.output_tokens += len(completion.token_ids) - entry.num_output_tokens
        entry.num_output_tokens = len(completion.token_ids)
        entry.text = completion.text
        entry.state = "running"
        if first:
            self._line(f"{output.request_id} joins, prompt of {entry.num_prompt_tokens} tokens")
        if output.finished:
            reason = completion.finish_reason
            entry.state = reason if reason in ("abort", "error") else "done"
            text = " ".join(entry.text.split())
            self._line(
                f"{output.request_id} ends ({completion.finish_reason}) with "
                f"{entry.num_output_tokens} tokens: {text}"
            )

    def _update_pooled(self, entry: Entry, output: PoolingRequestOutput) -> None:
        """Show the vector of a request that has ended."""
        data, reason = output.outputs.data, output.outputs.finish_reason
        entry.state = "done" if data is not None else reason
        if data is not None:
            entry.text = f"[{', '.join(f'{value:.3f}' for value in data[:2])}, ...]"
        self._line(
            f"{output.request_id} ends ({reason}), a vector of {entry.num_prompt_tokens} tokens"
        )

    def _find_rows(self) -> None:
        requests = self.engine.output_processor.requests
        for request_id, entry in self.entries.items():
            request = requests.get(request_id)
            entry.row = request.row if request else None
            if entry.row is not None and entry.state == "waiting":
                entry.state = "running"  # it has memory, but no token yet
            if request is not None and entry.row is None and entry.state == "running":
                entry.state = "waiting"
                self._line(f"{request_id} is retracted: it waits to be computed again")

    def _note(self, decision: Decision) -> None:
        if decision.kind == "wait":
            self._waits = f" ({decision.reason})"

    def _line(self, event: str) -> None:
        if self.plain:
            self.console.print(f"{self.elapsed:7.2f}s  {event}", soft_wrap=True, highlight=False)

    def _requests(self, entries: list[tuple[str, Entry]]) -> RenderableType:
        stats = self.engine.stats()
        rate = self.output_tokens / max(self.elapsed, 1e-9)
        table = Table(box=None, expand=True, pad_edge=False, show_edge=False)
        table.add_column("id", width=4, no_wrap=True)
        table.add_column("request", ratio=2, no_wrap=True, overflow="ellipsis")
        table.add_column("state", width=7)
        table.add_column("row", width=3, justify="right")
        table.add_column("prompt", width=6, justify="right")
        table.add_column("output", width=6, justify="right")
        table.add_column("text", ratio=5, no_wrap=True)
        text_width = max(10, (self.console.width - 45) * 5 // 7 - 2)
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
        summary = Text(
            f"step {stats.num_steps} · {stats.num_waiting} waiting{self._waits} · "
            f"{stats.num_running} running · "
            f"{self.output_tokens} tokens · {rate:.1f} tokens/s · {self.elapsed:.1f} s"
        )
        return Group(summary, table)

    def _visible(self) -> list[tuple[str, Entry]]:
        """Return the requests that fit on the screen. Those that ended first are left out first."""
        room = max(4, self.console.height - 4 - self.panel_lines)
        ended = [name for name, e in self.entries.items() if e.state in ("done", "abort", "error")]
        hidden = set(ended[: max(0, len(self.entries) - room)])
        return [(name, e) for name, e in self.entries.items() if name not in hidden][:room]


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
    return Text("".join(BLOCKS[min(8, round(8 * value / top))] for value in values), "cyan")


def summary_table(title: str, *columns: str) -> Table:
    """Return an empty table of results: one column of names, then columns of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for i, column in enumerate(columns):
        options: dict[str, Any] = {"justify": "right"} if i else {}
        table.add_column(column, **options)
    return table
