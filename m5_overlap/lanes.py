"""`Lanes`: host and forward of the last steps of a trace, to scale, one under the other."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from common.trace_record import Span, TraceRecord

STEPS_SHOWN = 6
NUM_LINES = 5  # of the panel
HOST = {"launch": ("L", "yellow"), "process": ("P", "magenta"), "wait": ("·", "dim")}
FORWARD = (("█", "cyan"), ("▒", "blue"))  # steps in turn


class Lanes:
    """Reads a record that may still grow."""

    def __init__(self, record: TraceRecord, console: Console) -> None:
        self.record = record
        self.console = console

    @property
    def mean_gap(self) -> float:
        """Seconds from the end of a forward to the beginning of the next, on average."""
        gaps = [after.start - before.end for before, after in pairwise(self.record.forwards)]
        return mean(gaps) if gaps else 0.0

    def panel(self, name: str = "") -> RenderableType:
        """The last steps whose forwards have ended."""
        forwards = self.record.forwards[-STEPS_SHOWN:]
        if not forwards:
            return Panel("no forward has ended yet", title="lanes", title_align="left")
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
        """A lane. What is shorter than a character still gets one, but waiting does not."""
        width = max(20, self.console.width - 13)
        cells = [(" ", "")] * width
        for span, character, style in sorted(spans, key=lambda item: item[1] != "·"):
            first = round((max(span.start, start) - start) / (end - start) * width)
            last = round((min(span.end, end) - start) / (end - start) * width)
            least = character in "LP"
            for cell in range(min(first, width - least), min(width, max(last, first + least))):
                cells[cell] = (character, style)
        line = Text(f"{name:8}")
        for character, style in cells:
            line.append(character, style)
        return line
