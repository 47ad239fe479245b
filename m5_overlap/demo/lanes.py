"""The two lanes of the demo: host and forward stream in the last steps, to scale."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from common.tracing.data import Span, TraceData

from .. import LLMEngine
from .panels import Panels

STEPS_SHOWN = 6
NUM_LINES = 5  # screen lines of the panel
HOST = {"launch": ("L", "yellow"), "process": ("P", "magenta"), "wait": ("·", "dim")}
FORWARD = (("█", "cyan"), ("▒", "blue"))  # of even and odd steps


class Lanes:
    """The lanes of a trace, which may still grow."""

    def __init__(self, trace: TraceData, console: Console) -> None:
        self.trace = trace
        self.console = console

    def panel(self, name: str = "lanes") -> RenderableType:
        """Return the last steps with a completed forward."""
        forwards = self.trace.forwards[-STEPS_SHOWN:]
        if not forwards:
            return Panel("no forward is complete yet", title="lanes", title_align="left")
        start, end = forwards[0].start, forwards[-1].end
        host = [s for s in self.trace.spans if s.name in HOST and s.end > start]
        lines = [
            self._line("host", [(span, *HOST[span.name]) for span in host], start, end),
            self._line(
                "forward", [(span, *FORWARD[span.step % 2]) for span in forwards], start, end
            ),
        ]
        busy = sum(span.end - span.start for span in forwards) / (end - start)
        lines.append(
            Text(
                f"{len(forwards)} steps, {1e3 * (end - start):.0f} ms: "
                f"the forward lane is busy {busy:.0%} of the time"
            )
        )
        title = f"{name}: L launch, P process, · wait; █ ▒ forwards in turn"
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

    def __init__(self, engine: LLMEngine, trace: TraceData, console: Console) -> None:
        self.lanes = Lanes(trace, console)
        self.panels = Panels(engine, console)
        self.num_lines = NUM_LINES + self.panels.num_lines

    def __call__(self) -> Iterable[RenderableType]:
        return [self.lanes.panel(), *self.panels()]
