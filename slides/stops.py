"""The stops of a lesson on slides. `DELTA.toml` of the milestone declares them, in reading order.

A deck with a `stops` block walks the lesson as `python -m milestones diff m2 m3 --stop N` does:
code of an earlier stop cannot be on a later slide. The caption of a piece of code names its stop.
"""

from __future__ import annotations

from html import escape

from milestones.course.diff.choose import stop_of
from milestones.course.diff.lesson import Stop, lesson
from milestones.course.diff.lesson_text import counts

from .sources import BuildError


class Walk:
    """The way of a deck through the stops between two milestones."""

    def __init__(self, below: str, above: str) -> None:
        self.lesson = lesson(below, above)
        self.last = 1  # the stop of the code that was shown last
        if not self.lesson.is_divided:
            raise BuildError(f"{above} has no stops: DELTA.toml of {above} declares none")

    def table(self) -> str:
        """Return a table of the stops: title, lines, and the files with the most of these lines."""
        rows = [
            f"<tr><td>{stop.number}</td><td>{escape(stop.title)}</td>"
            f"<td>{counts(stop)[0].replace(' ', '&nbsp;')}</td>"
            f"<td>{' '.join(f'<code>{escape(file)}</code>' for file in largest_files(stop))}</td>"
            "</tr>"
            for stop in self.lesson.stops
        ]
        heads = "".join(f"<th>{head}</th>" for head in ("stop", "", "lines", "mostly in"))
        below, above = (name[:2] for name in (self.lesson.below, self.lesson.above))
        return (
            f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
            f"<p><code>python -m milestones diff {below} {above} --stop 1</code></p>"
        )

    def caption(self, place: str) -> str:
        """Return the caption of code that a slide shows: its place, and its stop if it has one.

        Raises `BuildError` if the code belongs to an earlier stop than the code before it.
        """
        milestone, _, symbol = place.partition("/")
        stop = stop_of(symbol, self.lesson) if milestone == self.lesson.above else None
        if stop is None:
            return ""
        if stop.number < self.last:
            raise BuildError(
                f"{place} is of stop {stop.number} ({stop.title}), but a slide before shows code "
                f"of stop {self.last}: a deck walks the stops in the order of DELTA.toml"
            )
        self.last = stop.number
        return f" · stop {stop.number}"


def largest_files(stop: Stop, most: int = 2) -> list[str]:
    """Return the files of a stop with the most changed lines, in the order of the tour."""
    lines: dict[str, int] = {}
    for entry in stop.entries:
        for part in entry.parts:
            changes = [block for block in part.blocks if block.kind == "change"]
            count = sum(len(block.new) + len(block.old) for block in changes)
            lines[part.file] = lines.get(part.file, 0) + count
    largest = sorted(lines, key=lambda file: -lines[file])[:most]
    return [file for file in lines if file in largest]
