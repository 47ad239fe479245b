"""The two lanes of the demo: host and forward stream in the last steps, to scale."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import mean

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from common.trace_record import Span, TraceRecord

from .. import LLMEngine
from .panels import Panels

STEPS_SHOWN = 6
NUM_LINES = 5  # screen lines of the panel
HOST = {"launch": ("L", "yellow"), "process": ("P", "magenta"), "wait": ("·", "dim")}
FORWARD = (("█", "cyan"), ("▒", "blue"))  # of even and odd steps


class Lanes:
    """The lanes of a record, which may still grow."""

    def __init__(self, record: TraceRecord, console: Console) -> None:
        self.record = record
        self.console = console

    @property
    def mean_gap(self) -> float:
        """Return the mean seconds from the end of a forward to the start of the next one."""
        gaps = [after.start - before.end for before, after in pairwise(self.record.forwards)]
        return mean(gaps) if gaps else 0.0

    def panel(self, name: str = "") -> RenderableType:
        """Return the last steps with a completed forward."""
        forwards = self.record.forwards[-STEPS_SHOWN:]
        if not forwards:
            return Panel("no forward is complete yet", title="lanes", title_align="left")
        start, end = forwards[0].start, forwards[-1].end
        host = [s for s in self.record.spans if s.name in HOST and s.end > start]
        lines = [
            self._line("host", [(span, *HOST[span.name]) for span in host], start, end),
            self._line(
                "forward", [(span, *FORWARD[span.step % 2]) for span in forwards], start, end
            ),
        ]
        busy = sum(span.end - span.start for span in forwards) / (end - start)
        emulated = self.record.meta["emulated_forward_ms"]
        note = f"emulated forwards, at least {emulated:g} ms each · " if emulated else ""
        lines.append(
            Text(
                f"{note}gap between forwards: {1e3 * self.mean_gap:.2f} ms on average; here the "
                f"forward lane is busy {busy:.1%} of {1e3 * (end - start):.0f} ms"
            )
        )
        title = f"{name} lanes: L launch, P process, · wait; █ ▒ forwards in turn".strip()
        return Panel(Text("\n").join(lines), title=title, title_align="left")

    def _line(
        self, name: str, spans: list[tuple[Span, str, str]], start: float, end: float
    ) -> Text:
        """Return a lane. A span shorter than a character still gets one, unless it is waiting."""
        width = max(20, self.console.width - 13)
        cells = [(" ", "")] * width
        for span, character, style in sorted(spans, key=lambda item: item[1] != "·"):
            first = round((max(span.start, start) - start) / (end - start) * width)
            last = round((min(span.end, end) - start) / (end - start) * width)
            least = character in "LP"
            for cell in range(min(first, width - least), min(width, max(last, first + least))):
                cells[cell] = (character, style)
        return Text.assemble(f"{name:8}", *cells)


class LivePanels:
    """The lanes of the running engine, above the panels of the milestone below."""

    def __init__(self, engine: LLMEngine, record: TraceRecord, console: Console) -> None:
        self.lanes = Lanes(record, console)
        self.panels = Panels(engine, console)
        self.num_lines = NUM_LINES + self.panels.num_lines

    def __call__(self) -> Iterable[RenderableType]:
        return [self.lanes.panel(), *self.panels()]
