"""A screen that shows the requests of a running engine.

On a terminal the screen is live; anywhere else it is plain lines. All demos share it, and each adds
the panels of its own lesson. Every state is shown as a word too, never by a colour alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from typing_extensions import Self

from ..llm_engine import LLMEngine
from ..outputs import PoolingRequestOutput, RequestOutput
from ..tracing.decisions import Decision, watch
from .comparison import seconds
from .pace import HELP, Pace
from .request_table import Entry, request_table

REFRESH_SECONDS = 0.1
HOLD_SECONDS = 2.0  # how long a retraction is shown
LEAST_ROWS = 4  # requests that are shown, however low the terminal is
AROUND = 5  # lines of the requests' panel beside its rows: the border, two summaries, the head


class Dashboard:
    """Shows an engine between `__enter__` and `__exit__`. Add each request to both, then `step()`.

    On a terminal, a step is shown for a quarter of a second, and one that retracts a request for
    two seconds. Keys pause the run: see `Pace`.

    panels: called for each refresh; returns what the lesson shows below the requests. What comes
        first matters most: a low terminal shows only that.
    plain: plain lines instead of a live screen. None: plain if the console is not a terminal.
    """

    def __init__(
        self,
        engine: LLMEngine,
        title: str,
        console: Console,
        panels: Callable[[], Iterable[RenderableType]] = tuple,
        plain: bool | None = None,
    ) -> None:
        self.engine = engine
        self.title = title
        self.console = console
        self.panels = panels
        self.plain = not console.is_terminal if plain is None else plain
        self.entries: dict[str, Entry] = {}
        self.output_tokens = 0
        self._started, self._refreshed = engine.now(), time.perf_counter()
        self._live: Live | None = None
        self.pace = Pace() if not self.plain and console.file.isatty() else None
        self._waits = ""  # why no more requests join, since the last step
        self._retracted = ""  # what the last step retracted
        self._most_lines = 0  # of the panels, so far: the rows above them stay where they are
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
                self._retracted = ""
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
        self._waits = self._retracted = ""
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
            self.pace.wait(*[HOLD_SECONDS] * bool(self._retracted))
        return outputs

    def render(self) -> RenderableType:
        """Return the whole screen."""
        keys = HELP if self.pace is not None and self.pace.read_key is not None else None
        panels = self._fitting([*self.panels()])
        requests = Panel(
            self._requests(self._visible()),
            title=self.title, title_align="left", subtitle=keys, subtitle_align="left",
        )  # fmt: skip
        return Group(requests, *panels)

    def _fitting(self, panels: list[RenderableType]) -> list[RenderableType]:
        """Return the panels that fit the terminal below a few requests, and advice for the rest."""
        options = self.console.options.update(height=None)
        heights = [len(self.console.render_lines(panel, options, pad=False)) for panel in panels]
        needed = AROUND + LEAST_ROWS + sum(heights)
        if needed <= self.console.height:
            self._most_lines = max(self._most_lines, sum(heights))
            return panels
        shown, room = list[RenderableType](), self.console.height - AROUND - LEAST_ROWS - 1
        for panel, height in zip(panels, heights, strict=True):
            if height <= room:
                shown.append(panel)
                room -= height
        shown.append(Text(f"A terminal of {needed} lines shows more.", "dim"))
        self._most_lines = self.console.height
        return shown

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
            self._waits = decision.reason
        elif decision.kind == "retract" and decision.request is not None:
            pages = "1 page is" if decision.count == 1 else f"{decision.count} pages are"
            self._retracted = f"{decision.request.request_id} is retracted: {pages} free again"

    def _line(self, event: str) -> None:
        if self.plain:
            when = f"{seconds(self.elapsed):>8}"
            self.console.print(f"{when}  {event}", soft_wrap=True, highlight=False)

    def _requests(self, entries: list[tuple[str, Entry]]) -> RenderableType:
        stats = self.engine.stats()
        rate = self.output_tokens / max(self.elapsed, 1e-9)
        summary = Text(
            f"step {stats.num_steps} · {stats.num_running} running · "
            f"{self.output_tokens} tokens · {rate:.0f} tokens/s · {seconds(self.elapsed)}"
        )
        return Group(summary, request_table(entries, self.console.width), *self._queue())

    def _queue(self) -> list[Text]:
        """Return a line of what has no memory: what was retracted, or else what waits, and why."""
        if self._retracted:
            return [Text(self._retracted, "bold lost", no_wrap=True, overflow="ellipsis")]
        names = [name for name, entry in self.entries.items() if entry.state == "waiting"]
        if not names:
            return []
        why = f" ({self._waits})" * bool(self._waits)
        words = f"{len(names)} waiting{why}: {' '.join(names)}"
        return [Text(words, "dim", no_wrap=True, overflow="ellipsis")]

    def _visible(self) -> list[tuple[str, Entry]]:
        """Return the requests that fit on the screen. Those that ended first are left out first."""
        room = max(LEAST_ROWS, self.console.height - AROUND - self._most_lines)
        came = {name: entry for name, entry in self.entries.items() if entry.state != "waiting"}
        ended = [name for name, entry in came.items() if entry.state != "running"]
        hidden = set(ended[: max(0, len(came) - room)])
        return [(name, entry) for name, entry in came.items() if name not in hidden][:room]
