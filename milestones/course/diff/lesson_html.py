"""Write a lesson as one HTML file that loads nothing else and can be read without its script.

The code is coloured here and not in the browser. On a wide screen the two milestones stand side by
side. On a narrow one the old lines come before the new ones, with the same elements and another
layout in `lesson.css`.
"""

from __future__ import annotations

import difflib
import re
from html import escape
from itertools import groupby
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
Pieces = list[tuple[str, str]]  # of a line: class or "", and text
Coloured = dict[int, Pieces]  # by the number of a line


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
        was, now = old[a.number] if a else [], new[b.number] if b else []
        if a and b:
            was, now = _marked(was, now)
        gone += [_cell("old gone", row, a, was)] if a else []
        come += [_cell("new come", row, b, now)] if b else []
    return f'<div class="block">{"".join(gone + come)}</div>'


def _cell(kind: str, row: int, line: Line, pieces: Pieces) -> str:
    text = "".join(f'<i class="{c}">{escape(t)}</i>' if c else escape(t) for c, t in pieces)
    indent = len(line.text) - len(line.text.lstrip())
    style = f"--row:{row};--in:{indent}"
    return f'<div class="{kind}" style="{style}" data-n="{line.number}">{text}\n</div>'


def _coloured(lines: list[Line]) -> Coloured:
    """Colour the pieces of each line. All lines are coloured together, because of docstrings."""
    pieces: list[Pieces] = [[]]
    source = "\n".join(line.text for line in lines)
    for token, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        kind = next((name for of, name in COLOURS if token in of), "")
        first, *others = text.split("\n")
        pieces[-1].append((kind, first))
        pieces += [[(kind, other)] for other in others]
    return {line.number: found for line, found in zip(lines, pieces, strict=False)}


def _marked(old: Pieces, new: Pieces) -> tuple[Pieces, Pieces]:
    """Return the pieces of two lines. If these are similar, changed words have the class `w`."""
    if likeness(*("".join(text for _, text in pieces) for pieces in (old, new))) < ALIKE:
        return old, new
    before, after = (
        [(kind, word) for kind, text in pieces for word in words(text)] for pieces in (old, new)
    )
    was, now = ([word for _, word in pieces] for pieces in (before, after))
    for tag, i, j, k, end in difflib.SequenceMatcher(None, was, now, False).get_opcodes():
        if tag != "equal":
            before[i:j] = [(f"{kind} w".strip(), word) for kind, word in before[i:j]]
            after[k:end] = [(f"{kind} w".strip(), word) for kind, word in after[k:end]]
    return _joined(before), _joined(after)


def _joined(pieces: Pieces) -> Pieces:
    """Return the pieces, with those of one class in a row as one piece."""
    runs = groupby(pieces, lambda piece: piece[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in runs]
