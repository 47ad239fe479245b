"""Write a lesson as one HTML file that loads nothing else and can be read without its script.

The code is coloured here and not in the browser. On a wide screen the two milestones stand side by
side. On a narrow one the old lines come before the new ones, with the same elements and another
layout in `lesson.css`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from pygments.lexers.python import PythonLexer
from pygments.token import Token

from .align import ALIKE, aligned, likeness, words
from .lesson import Block, Entry, Lesson, Line, Part, Stop
from .lesson_text import counts

HERE = Path(__file__).resolve().parent
COLOURS = (  # a token has the class of the first type that contains it
    (Token.Literal.String.Doc, "s"),
    (Token.Literal.String.Interpol, "i"),
    (Token.Literal.String, "s"),
    (Token.Comment, "c"),
    (Token.Keyword, "k"),
    (Token.Operator.Word, "k"),
    (Token.Literal.Number, "n"),
    (Token.Name.Function, "f"),
    (Token.Name.Class, "f"),
    (Token.Name.Decorator, "d"),
    (Token.Name.Builtin, "b"),
    (Token.Name.Exception, "b"),
)
Numbers = dict[str, int]  # name of an entry -> its number in the tour
Coloured = dict[int, list[tuple[str, str]]]  # line number -> (class or "", text) of each piece


def page(lesson: Lesson) -> str:
    """Return the whole page."""
    numbers = {entry.name: number for number, entry in enumerate(lesson.entries, start=1)}
    return (
        (HERE / "lesson.html")
        .read_text(encoding="utf-8")
        .replace("{{css}}", (HERE / "lesson.css").read_text(encoding="utf-8"))
        .replace("{{below}}", escape(lesson.below))
        .replace("{{above}}", escape(lesson.above))
        .replace("{{size}}", size(lesson))
        .replace("{{tour}}", "".join(_tour(stop, numbers) for stop in lesson.stops))
        .replace("{{contents}}", _contents(lesson))
        .replace("{{body}}", "".join(_stop(stop, numbers) for stop in lesson.stops))
    )


def anchor(symbol: str) -> str:
    """Return the id of a symbol's section: its name without signs that an id cannot have."""
    return re.sub(r"[^\w.:-]", "", symbol)


def size(lesson: Lesson) -> str:
    """Return how many stops and entries a page has, as a text."""
    entries = f"{len(lesson.entries)} entr{'y' if len(lesson.entries) == 1 else 'ies'}"
    stops = f"{len(lesson.stops)} stop{'' if len(lesson.stops) == 1 else 's'}"
    return f"{stops} with {entries}" if lesson.is_divided else entries


def _contents(lesson: Lesson) -> str:
    """Return the table of the stops."""
    if not lesson.is_divided:
        return ""
    rows = []
    for stop in lesson.stops:
        lines, symbols = counts(stop)
        link = f'<a href="#stop-{stop.number}">{escape(stop.title)}</a>'
        rows.append(
            f"<tr><td>{stop.number}</td><td>{link}</td><td>{lines}</td><td>{symbols}</td></tr>"
        )
    head = "<tr><th>stop</th><th></th><th>lines</th><th>symbols</th></tr>"
    return f'<table class="contents">{head}{"".join(rows)}</table>'


def _tour(stop: Stop, numbers: Numbers) -> str:
    """Return the links to the entries of a stop, below its title."""
    title = f'<a href="#stop-{stop.number}">{stop.number}. {escape(stop.title)}</a>'
    items = []
    for entry in stop.entries:
        file, _, name = entry.name.partition(":")
        name = escape(name).replace(".", ".<wbr>") or "the whole file"
        items.append(
            f'<li class="{entry.kind}"><a href="#{anchor(entry.name)}">'
            f"<small>{escape(file)}</small> {name}</a></li>"
        )
    links = f'<ol start="{numbers[stop.entries[0].name]}">{"".join(items)}</ol>'
    return f"<p>{title}</p>{links}" if stop.title else links


def _stop(stop: Stop, numbers: Numbers) -> str:
    entries = "".join(_entry(entry, numbers[entry.name]) for entry in stop.entries)
    if not stop.title:
        return entries
    lines, symbols = counts(stop)
    return (
        f'<section id="stop-{stop.number}"><h1>{stop.number}. {escape(stop.title)}</h1>'
        f"<p>Lines {lines}, symbols {symbols}.</p>{entries}</section>\n"
    )


def _entry(entry: Entry, number: int) -> str:
    file, _, name = entry.name.partition(":")
    title = f"<code>{escape(file)}</code>" + (f" <code>{escape(name)}</code>" if name else "")
    parts = "".join(_part(part, entry.name) for part in entry.parts)
    return (
        f'<details open class="entry" id="{anchor(entry.name)}"><summary><h2>{number}. {title} '
        f'<b class="{entry.kind}">{entry.kind}</b> <a href="#{anchor(entry.name)}">#</a></h2>'
        f"<p>{escape(entry.reason)}</p></summary>{parts}</details>\n"
    )


def _part(part: Part, entry: str) -> str:
    heading = ""
    if part.symbol != entry or part.moved:
        words = f"unchanged; also at {part.moved}" if part.moved else part.kind
        place = "" if part.symbol == entry else f' id="{anchor(part.symbol)}"'
        heading = f"<h3{place}><code>{escape(part.symbol)}</code> {escape(words)}</h3>"
    old = _coloured([line for block in part.blocks for line in block.old])
    new = _coloured([line for block in part.blocks for line in block.new])
    body = "".join(_block(block, old, new) for block in part.blocks)
    one_sided = "" if part.kind == "changed" else " one"
    return f'{heading}<div class="code{one_sided}">{body}</div>' if body else heading


def _block(block: Block, old: Coloured, new: Coloured) -> str:
    if block.kind != "change":
        rows = "".join(
            _cell("old same", row, a, old[a.number]) + _cell("new same", row, b, new[b.number])
            for row, (a, b) in enumerate(zip(block.old, block.new, strict=True), start=1)
        )
        grid = f'<div class="block">{rows}</div>'
        if block.kind == "same":
            return grid
        return f"<details><summary>{len(block.new)} unchanged lines</summary>{grid}</details>"
    gone, come = [], []
    for row, (a, b) in enumerate(aligned(block.old, block.new), start=1):
        marks = _changed_columns(a.text, b.text) if a and b else ([], [])
        gone += [_cell("old gone", row, a, _cut(old[a.number], marks[0]))] if a else []
        come += [_cell("new come", row, b, _cut(new[b.number], marks[1]))] if b else []
    return f'<div class="block">{"".join(gone + come)}</div>'


def _cell(kind: str, row: int, line: Line, pieces: list[tuple[str, str]]) -> str:
    text = "".join(f'<i class="{c}">{escape(t)}</i>' if c else escape(t) for c, t in pieces)
    indent = len(line.text) - len(line.text.lstrip())
    style = f"--row:{row};--in:{indent}"
    return f'<div class="{kind}" style="{style}" data-n="{line.number}">{text}\n</div>'


def _coloured(lines: list[Line]) -> Coloured:
    """Colour the pieces of each line. All lines are coloured together, because of docstrings."""
    pieces: list[list[tuple[str, str]]] = [[]]
    source = "\n".join(line.text for line in lines)
    for token, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        kind = next((name for of, name in COLOURS if token in of), "")
        first, *others = text.split("\n")
        pieces[-1].append((kind, first))
        pieces += [[(kind, other)] for other in others]
    return {line.number: found for line, found in zip(lines, pieces, strict=False)}


Columns = list[tuple[int, int]]


def _changed_columns(old: str, new: str) -> tuple[Columns, Columns]:
    """Return the columns in which two similar lines differ; none if they are not similar."""
    if likeness(old, new) < ALIKE:
        return [], []
    before, after = words(old), words(new)
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [code[1:] for code in codes if code[0] != "equal"]
    return (
        [_columns(before, i, j) for i, j, _, _ in changed],
        [_columns(after, i, j) for _, _, i, j in changed],
    )


def _columns(words: list[str], first: int, end: int) -> tuple[int, int]:
    start = len("".join(words[:first]))
    return start, start + len("".join(words[first:end]))


def _cut(pieces: list[tuple[str, str]], marks: Columns) -> list[tuple[str, str]]:
    """Return the pieces of a line. Those in marked columns also get the class `w`."""
    if not marks:
        return pieces
    edges = sorted({edge for mark in marks for edge in mark})
    cut: list[tuple[str, str]] = []
    for start, kind, text in _placed(pieces):
        inner = [edge - start for edge in edges if start < edge < start + len(text)]
        for i, j in zip([0, *inner], [*inner, len(text)], strict=True):
            marked = any(a <= start + i < b for a, b in marks)
            cut.append((f"{kind} w".strip() if marked else kind, text[i:j]))
    return cut


def _placed(pieces: list[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    start = 0
    for kind, text in pieces:
        yield start, kind, text
        start += len(text)
