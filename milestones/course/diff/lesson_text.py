"""Show a lesson in the terminal: unified or side by side, with colours in a terminal.

The plain unified form is a normal diff. Each reason is a line that begins with #.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.console import Console, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ...chain import short
from .align import aligned
from .lesson import Block, Entry, Lesson, Line, Part, Stop

THEME = "ansi_dark"  # the terminal's own colours, for any background
STYLES = {"-": "on #4b1f24", "+": "on #16391f", " ": ""}
MIN_COLUMN = 40  # characters; a narrower column cannot be read


def plain(lesson: Lesson) -> Iterator[str]:
    """Yield the lines of a unified diff, with the reasons as comments."""
    for entry, heading in _headed(lesson):
        if heading:
            yield f"# {heading}"
        yield f"# {entry.name} ({entry.kind}): {entry.reason}"
        for part in entry.parts:
            if part.moved:
                yield f"# {part.symbol}: {_moved(part)}"
                continue
            yield f"--- {lesson.below + '/' + part.file if part.kind != 'added' else '/dev/null'}"
            yield f"+++ {lesson.above + '/' + part.file if part.kind != 'removed' else '/dev/null'}"
            for hunk in hunks(part):
                old = [line for block in hunk for line in block.old]
                new = [line for block in hunk for line in block.new]
                name = part.symbol.partition(":")[2]
                yield f"@@ -{_span(old)} +{_span(new)} @@ {name}".rstrip()
                for mark, line in _marked(hunk):
                    yield f"{mark}{line.text}"
        yield ""


def plain_columns(lesson: Lesson, width: int) -> Iterator[str]:
    """Yield the diff in two columns, for a width in characters. Long lines are cut."""
    column = max(MIN_COLUMN, (width - 3) // 2)
    for entry, heading in _headed(lesson):
        if heading:
            yield f"# {heading}"
        yield f"# {entry.name} ({entry.kind}): {entry.reason}"
        for part in entry.parts:
            yield f"# {part.symbol}: {_moved(part)}" if part.moved else f"# {part.symbol}"
            for hunk in hunks(part):
                for mark, old, new in _pairs(hunk):
                    left = (old.text if old else "")[:column]
                    right = (new.text if new else "")[:column]
                    yield f"{left:<{column}} {mark} {right}".rstrip()
                yield ""


def show(lesson: Lesson, console: Console, *, columns: bool) -> None:
    """Show the tour with colours: each entry with its number, symbol and reason."""
    for number, (entry, heading) in enumerate(_headed(lesson), start=1):
        console.rule(style="dim")
        if heading:
            console.print(Text(heading, "bold"))
            console.rule(style="dim")
        console.print(_heading(entry, number, len(lesson.entries)))
        for part in entry.parts:
            if part.symbol != entry.name or part.moved:
                words = f" {_moved(part)}" if part.moved else f" ({part.kind})"
                console.print(Text(part.symbol, "bold").append(words, "dim"))
            for hunk in hunks(part):
                console.print(_columns(hunk) if columns else _unified(hunk))
        console.print()


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


def _heading(entry: Entry, number: int, total: int) -> Text:
    file, _, name = entry.name.partition(":")
    text = Text(f"{number}/{total}  ", "dim").append(file, "cyan")
    if name:
        text.append(" · ", "dim").append(name, "bold cyan")
    style = {"added": "green", "removed": "red", "changed": "yellow"}[entry.kind]
    return text.append(f"  {entry.kind}", style).append(f"\n{entry.reason}", "italic")


def _unified(hunk: list[Block]) -> RenderableType:
    """Return a hunk as a table: for each line its number, its mark and its code."""
    code = _highlighters(hunk)
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for mark, line in _marked(hunk):
        text = code[mark](line)
        number = Text(str(line.number), "dim red" if mark == "-" else "dim")
        table.add_row(number, Text(mark + " ").append_text(text), style=STYLES[mark])
    return table


def _columns(hunk: list[Block]) -> RenderableType:
    code = _highlighters(hunk)
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    for _ in range(2):
        table.add_column(justify="right", style="dim", no_wrap=True)
        table.add_column(ratio=1)
    for mark, old, new in _pairs(hunk):
        cells: list[RenderableType] = []
        for sign, line in (("-", old), ("+", new)):
            number = str(line.number) if line else ""
            text = code[sign](line) if line else Text()
            if line and mark != " ":
                text.stylize(STYLES[sign])
            cells += [number, text]
        table.add_row(*cells)
    return table


def _highlighters(hunk: list[Block]) -> dict[str, Callable[[Line], Text]]:
    """Return for each side a function that colours a line as part of its hunk."""
    sides = {}
    for mark, lines in (
        ("-", [line for block in hunk for line in block.old]),
        ("+", [line for block in hunk for line in block.new]),
    ):
        syntax = Syntax("", "python", theme=THEME, background_color="default")
        coloured = syntax.highlight("\n".join(line.text for line in lines)).split("\n")
        sides[mark] = {line.number: text for line, text in zip(lines, coloured, strict=False)}

    def of(mark: str) -> Callable[[Line], Text]:
        return lambda line: sides[mark].get(line.number, Text(line.text)).copy()

    return {"-": of("-"), "+": of("+"), " ": of("+")}


def _marked(hunk: list[Block]) -> Iterator[tuple[str, Line]]:
    for block in hunk:
        if block.kind == "change":
            yield from (("-", line) for line in block.old)
            yield from (("+", line) for line in block.new)
        else:
            yield from ((" ", line) for line in block.new)


def _pairs(hunk: list[Block]) -> Iterator[tuple[str, Line | None, Line | None]]:
    for block in hunk:
        if block.kind != "change":
            yield from ((" ", old, new) for old, new in zip(block.old, block.new, strict=True))
            continue
        for left, right in aligned(block.old, block.new):
            yield "|" if left and right else "<" if left else ">", left, right


def _moved(part: Part) -> str:
    return f"unchanged, {'moved from' if part.kind == 'added' else 'now at'} {part.moved}"


def _span(lines: list[Line]) -> str:
    return f"{lines[0].number},{len(lines)}" if lines else "0,0"
