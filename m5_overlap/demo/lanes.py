"""The lanes of the demo: host and forward stream in some steps, to scale."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from common.tracing.data import Span, TraceData

from .. import LLMEngine
from .panels import Panels

STEPS_SHOWN = 6
HOST = {"launch": ("L", "work"), "process": ("P", "output"), "wait": ("·", "dim")}
FORWARD = (("█", "forward"), ("▒", "forward"))  # of even and odd steps


class Lanes:
    """The lanes of traces, which may still grow. Several have one time axis, from their first step.

    traces: of one run; or those of several runs, by their names.
    """

    def __init__(self, traces: TraceData | dict[str, TraceData], console: Console) -> None:
        self.traces = {"": traces} if isinstance(traces, TraceData) else traces
        self.console = console

    def panel(self, name: str = "lanes") -> RenderableType:
        """Return steps with a completed forward: the last ones, or of several runs, the middle."""
        shown = {name: self._forwards(trace) for name, trace in self.traces.items()}
        if not all(shown.values()):
            return Panel("no forward is complete yet", title="lanes", title_align="left")
        length = max(forwards[-1].end - forwards[0].start for forwards in shown.values())
        lines = []
        for run, forwards in shown.items():
            start, end = forwards[0].start, forwards[-1].end
            spans = self.traces[run].spans
            host = [s for s in spans if s.name in HOST and s.end > start and s.start < end]
            lines += [
                self._line("host", [(s, *HOST[s.name]) for s in host], start, length),
                self._line("forward", [(s, *FORWARD[s.step % 2]) for s in forwards], start, length),
            ]
            busy = sum(span.end - span.start for span in forwards) / (end - start)
            lines.append(
                Text(
                    f"{run}: " * bool(run) + f"{len(forwards)} steps, {1e3 * (end - start):.1f} ms:"
                    f" the forward lane is busy {busy:.0%} of the time"
                )
            )
        title = f"{name}: L launch, P process, · wait; █ ▒ forwards in turn"
        costs = next(iter(self.traces.values())).meta.get("step_costs")
        return Panel(Text("\n").join(lines), title=title, title_align="left",
                     subtitle=costs, subtitle_align="left")  # fmt: skip

    def _forwards(self, trace: TraceData) -> list[Span]:
        forwards = trace.forwards
        first = len(forwards) - STEPS_SHOWN
        if len(self.traces) > 1:
            first //= 2
        return forwards[max(0, first) :][:STEPS_SHOWN]

    def _line(
        self, name: str, spans: list[tuple[Span, str, str]], start: float, length: float
    ) -> Text:
        """Return a lane. A span shorter than a character still gets one, unless it is waiting."""
        width = max(20, self.console.width - 13)
        cells = [(" ", "")] * width
        for span, character, style in sorted(spans, key=lambda item: item[1] != "·"):
            first = round((max(span.start, start) - start) / length * width)
            last = round((min(span.end, start + length) - start) / length * width)
            least = character in "LP"
            for cell in range(min(first, width - least), min(width, max(last, first + least))):
                cells[cell] = (character, style)
        return Text.assemble(f"{name:8}", *cells)


class LivePanels:
    """The lanes of the running engine, above the panels of the milestone below."""

    def __init__(self, engine: LLMEngine, trace: TraceData, console: Console) -> None:
        self.lanes = Lanes(trace, console)
        self.panels = Panels(engine, console)

    def __call__(self) -> Iterable[RenderableType]:
        return [self.lanes.panel(), *self.panels()]
