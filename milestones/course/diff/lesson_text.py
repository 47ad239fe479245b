"""Show a lesson in the terminal, unified or side by side.

The unified form is a normal diff, and each reason is a line that begins with #. In a terminal, the
lines have the colours of `git diff`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from ...chain import short
from ..outline import Line
from .align import aligned
from .lesson import Entry, Lesson, Stop
from .parts import Block, Part

STYLES = {"#": "bold", "@": "cyan", "-": "red", "+": "green"}  # by the first character of a line
MIN_COLUMN = 40  # characters; a narrower column cannot be read


def show(lesson: Lesson, console: Console, *, columns: bool) -> None:
    """Print the tour, with colours if the console is a terminal."""
    for line in plain(lesson, console.width if columns else None):
        style = "" if columns else STYLES.get(line[:1], "")
        console.print(Text(line, style), soft_wrap=True)


def plain(lesson: Lesson, width: int | None = None) -> Iterator[str]:
    """Yield the lines of a unified diff, with the reasons as comments.

    width: in characters, for two columns beside each other. Long lines go on in the next row.
    """
    for entry, heading in _headed(lesson):
        if heading:
            yield f"# {heading}"
        yield f"# {entry.name} ({entry.kind}): {entry.reason}"
        for part in entry.parts:
            if part.moved:
                where = "moved from" if part.kind == "added" else "now at"
                yield f"# {part.symbol}: unchanged, {where} {part.moved}"
            elif width is None:
                yield from _unified(part, lesson)
            else:
                yield from _columns(part, max(MIN_COLUMN, (width - 3) // 2))
        yield ""


def _unified(part: Part, lesson: Lesson) -> Iterator[str]:
    yield f"--- {lesson.below + '/' + part.file if part.kind != 'added' else '/dev/null'}"
    yield f"+++ {lesson.above + '/' + part.file if part.kind != 'removed' else '/dev/null'}"
    for hunk in hunks(part):
        old = [line for block in hunk for line in block.old]
        new = [line for block in hunk for line in block.new]
        yield f"@@ -{_span(old)} +{_span(new)} @@ {part.symbol.partition(':')[2]}".rstrip()
        for block in hunk:
            if block.kind == "change":
                yield from (f"-{line.text}" for line in block.old)
            yield from (f"{'+ '[block.kind != 'change']}{line.text}" for line in block.new)


def _columns(part: Part, column: int) -> Iterator[str]:
    yield f"# {part.symbol}"
    for number, hunk in enumerate(hunks(part)):
        if number:
            yield ""
        for mark, old, new in _pairs(hunk):
            sides = [line.text if line else "" for line in (old, new)]
            for start in range(0, max(1, *map(len, sides)), column):
                left, right = (text[start : start + column] for text in sides)
                yield f"{left:<{column}} {mark} {right}".rstrip()


def overview(lesson: Lesson) -> Iterator[str]:
    """Yield the stops of a lesson, each with the numbers of its lines and symbols."""
    below, above = (short(name) for name in (lesson.below, lesson.above))
    rows = [(str(stop.number), stop.title, *counts(stop)) for stop in lesson.stops]
    whole = Stop(0, "", lesson.entries)
    rows = [("stop", "", "lines", "symbols"), *rows, ("", "together", *counts(whole))]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    yield f"{lesson.below} to {lesson.above}, in {len(lesson.stops)} stops"
    yield ""
    for number, title, lines, symbols in rows:
        yield (
            f"{number:>{widths[0]}}  {title:<{widths[1]}}  "
            f"{lines:>{widths[2]}}  {symbols:>{widths[3]}}"
        )
    yield ""
    yield f"python -m milestones diff {below} {above} --stop {lesson.stops[0].number}"
    yield "shows a stop; --stop all shows all of them, --html FILE writes them as a page."


def counts(stop: Stop) -> tuple[str, str]:
    """Return the numbers of added and removed lines, "+12 -3", and of symbols, as texts."""
    added, removed = stop.num_lines
    return f"+{added} -{removed}", str(stop.num_symbols)


def hunks(part: Part) -> Iterator[list[Block]]:
    """Yield the runs of blocks between folds."""
    for folded, run in groupby(part.blocks, lambda block: block.kind == "fold"):
        if not folded:
            yield list(run)


def _headed(lesson: Lesson) -> Iterator[tuple[Entry, str]]:
    """Yield the entries. The first entry of a stop has a heading with the stop's title."""
    for stop in lesson.stops:
        for index, entry in enumerate(stop.entries):
            first = stop.title and index == 0
            lines, symbols = counts(stop)
            sizes = f"lines {lines}, symbols {symbols}"
            yield entry, f"Stop {stop.number}: {stop.title} ({sizes})" if first else ""


def _pairs(hunk: list[Block]) -> Iterator[tuple[str, Line | None, Line | None]]:
    for block in hunk:
        if block.kind != "change":
            yield from ((" ", old, new) for old, new in zip(block.old, block.new, strict=True))
            continue
        for left, right in aligned(block.old, block.new):
            yield "|" if left and right else "<" if left else ">", left, right


def _span(lines: list[Line]) -> str:
    return f"{lines[0].number},{len(lines)}" if lines else "0,0"
