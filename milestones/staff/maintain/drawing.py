"""A canvas for the pictures of the handouts, for light and dark backgrounds. People with any colour
vision can distinguish its colours (Okabe and Ito, 2008)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...drawing import svg

COLORS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00")
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#24292f}.t{font-size:14px;font-weight:600}"
    ".p{fill:#fff}line{stroke:#d0d7de}.l{fill-opacity:.3}.m{stroke:#24292f;stroke-width:1.5}"
    + "".join(f".c{i}{{fill:{color}}}" for i, color in enumerate(COLORS))
    + "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.p{fill:#0d1117}"
    "line{stroke:#30363d}.m{stroke:#e6edf3}}"
)


class Drawing:
    """Collects shapes in drawing order. `text()` returns the file."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.rules: list[str] = []  # CSS of this picture, after `STYLE`
        self.size, self.title = (width, height), title
        self.parts = [svg.rect(0, 0, width, height, "p"), svg.text(12, 20, title, "t")]

    def rect(
        self, x: float, y: float, width: float, height: float, color: int, *, light: bool = False
    ) -> None:
        """Draw a filled rectangle. light: with the pale form of its colour."""
        kind = f"c{color % len(COLORS)}{' l' * light}"
        self.parts.append(svg.rect(x, y, width, height, kind))

    def cover(self, x: float, y: float, width: float, height: float) -> None:
        """Draw a rectangle in the colour of the background."""
        self.parts.append(svg.rect(x, y, width, height, "p"))

    def steps(
        self, x: float, bottom: float, width: float, heights: list[float], color: int
    ) -> None:
        """Draw a staircase above `bottom`. Each step is `width` wide."""
        path, last = f"M{x:g} {bottom:g}", 0.0
        run = 0.0
        for height in heights:
            if round(height, 1) != round(last, 1):
                path += (f"h{run:g}" if run else "") + f"V{bottom - height:.4g}"
                run, last = 0.0, height
            run += width
        path += f"h{run:g}V{bottom:g}z"
        self.parts.append(svg.path(path, f"c{color % len(COLORS)}"))

    def line(self, x: float, y: float, end: float) -> None:
        """Draw a thin horizontal line."""
        self.parts.append(svg.line(x, y, end, y))

    def mark(self, x: float, top: float, bottom: float, text: str) -> None:
        """Draw a vertical line through a picture, with its name at the top."""
        self.upright(x, top, bottom)
        self.label(x, top - 3, text)

    def upright(self, x: float, top: float, bottom: float) -> None:
        """Draw a vertical line."""
        self.parts.append(svg.line(x, top, x, bottom, "m"))

    def label(
        self, x: float, y: float, text: str, anchor: str = "middle", *, kind: str = ""
    ) -> None:
        """Write a word. anchor: start, middle or end. kind: its CSS classes."""
        self.parts.append(svg.text(x, y, text, kind, anchor=anchor))

    def axis(self, x: float, y: float, width: float, count: int, *, every: int) -> None:
        """Draw the numbers of the steps below a picture, starting with 1."""
        self.line(x, y, x + count * width)
        for step in range(0, count, every):
            self.label(x + (step + 0.5) * width, y + 14, f"{step + 1}")
        self.label(x + count * width, y + 28, "step", "end")

    def legend(self, x: float, y: float, entries: list[tuple[int, bool, str]]) -> None:
        """Draw a legend. An entry has a colour, whether it is the pale form, and its meaning."""
        for color, light, text in entries:
            self.rect(x, y - 9, 10, 10, color, light=light)
            self.label(x + 15, y, text, "start")
            x += 40 + 6 * len(text)

    def text(self) -> str:
        """Return the file."""
        return svg.document(self.parts, *self.size, STYLE + "".join(self.rules), self.title)


class Player:
    """Plays a drawing over time: it moves and shows shapes by CSS, again and again.

    Without animation the drawing shows its end: in a program that cannot animate, and on a system
    with the setting "reduce motion".
    """

    def __init__(self, drawing: Drawing, seconds: float, hold: float, speed: float = 1) -> None:
        """Times are those of the run, which takes `seconds` and plays `speed` times as fast.

        hold: the seconds that the end stays visible.
        """
        self.drawing = drawing
        self.seconds = seconds
        self.speed = speed
        self.period = seconds / speed + hold
        drawing.rules += [
            f"g{{animation:{self.period:.2f}s linear infinite}}",
            "@media(prefers-reduced-motion:reduce){g{animation:none!important}}",
        ]

    @contextmanager
    def moving(self, name: str, distance: float) -> Iterator[None]:
        """Move what is drawn inside to the right by `distance` pixels while the play lasts."""
        end = f"transform:translateX({distance:g}px)"
        self.drawing.rules += [
            f"#{name}{{animation-name:{name};{end}}}",
            f"@keyframes {name}{{0%{{transform:none}}{self._at(self.seconds)},to{{{end}}}}}",
        ]
        with self._group(name):
            yield

    @contextmanager
    def shown(self, name: str, start: float, end: float | None = None) -> Iterator[None]:
        """Show what is drawn inside from `start` to `end`, in seconds.

        end: None if it stays visible until the play starts again.
        """
        times = "0%{opacity:0}" if start > 0 else ""
        times += f"{self._at(start)}{{opacity:1}}"
        times += "to{opacity:1}" if end is None else f"{self._at(end)},to{{opacity:0}}"
        self.drawing.rules += [
            f"#{name}{{animation-name:{name};animation-timing-function:step-end;"
            f"opacity:{int(end is None)}}}",
            f"@keyframes {name}{{{times}}}",
        ]
        with self._group(name):
            yield

    @contextmanager
    def _group(self, name: str) -> Iterator[None]:
        self.drawing.parts.append(f'<g id="{name}">')
        yield
        self.drawing.parts.append("</g>")

    def _at(self, seconds: float) -> str:
        return f"{100 * seconds / self.speed / self.period:.2f}%"
